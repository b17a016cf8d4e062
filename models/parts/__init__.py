"""What decoders are made of, as values: sizes, state and how ranks share them. No weights, no torch."""
