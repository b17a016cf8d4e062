"""What can go wrong between the ranks of a worker."""


class RankLostError(Exception):
    """A rank has ended or does not answer, so that the worker's ranks no longer agree: the worker must start anew."""
