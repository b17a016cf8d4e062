"""What can go wrong between a checkpoint folder and a running model.

ModelError
├── CheckpointError            the folder or one of its files
│   ├── MissingCheckpointError   there is no folder, no config.json, no weights
│   ├── BrokenCheckpointError    a file is there and cannot be read: bad JSON, truncated, not safetensors
│   └── WeightsError             weights are missing, unexpected or of the wrong shape
├── ConfigError                a field of config.json has a value that Tandem does not implement
│   └── UnknownModelError        the model type itself
└── ConversionError            a GGUF file could not be converted
"""

from __future__ import annotations


class ModelError(Exception):
    """Root of everything that `models` raises for reasons outside the code."""


class CheckpointError(ModelError):
    """Something is wrong with the checkpoint folder or its files."""


class MissingCheckpointError(CheckpointError):
    """The folder, its config.json or its weights do not exist."""


class BrokenCheckpointError(CheckpointError):
    """A file exists and cannot be read; the text names the file and what is wrong with it."""


class WeightsError(CheckpointError):
    """The weights on disk are not the weights that config.json describes; the text lists the differences."""


class ConfigError(ModelError):
    """A field of config.json has a value that is not implemented; the text names field and value."""


class UnknownModelError(ConfigError):
    """No family implements this model type; the text lists those that are."""


class ConversionError(ModelError):
    """A GGUF file could not be turned into a checkpoint folder."""
