"""The prefill worker: computes prompts chunk by chunk and hands requests over."""
