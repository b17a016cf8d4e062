"""The parts that decoders are made of, each with a plain reference beside the fast form."""
