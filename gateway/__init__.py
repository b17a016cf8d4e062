"""What clients talk to: HTTP API, tokenizer, routing, streams. Never imports torch."""
