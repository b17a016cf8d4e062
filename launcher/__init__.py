"""The tandem command: configuration, processes, plans."""
