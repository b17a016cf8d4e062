"""Running a model on the pools: families, layers, weights, forward batch, sampling."""
