"""The decode worker: takes requests over and generates their tokens."""
