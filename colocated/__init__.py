"""One worker that does both phases: the reference that every disaggregated run must equal."""
