"""The tensor-parallel ranks of one worker: the leader's handle on them, and what a follower does."""
