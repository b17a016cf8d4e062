"""One file a model family: what its config means, as an Architecture."""
