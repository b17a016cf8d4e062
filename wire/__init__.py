"""What processes say to each other: messages, codec, links."""
