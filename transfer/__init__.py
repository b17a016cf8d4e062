"""Moving one request's state from a prefill worker's pools to a decode worker's."""
