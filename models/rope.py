"""Rotary frequencies from config.json, in both spellings.

Version 5 of transformers writes one object `rope_parameters`; earlier files have `rope_theta` and an optional
`rope_scaling` beside it. The formulas are those of `transformers.modeling_rope_utils`: `linear` (positions divided
by a factor), `llama3` (Llama 3.1: long waves divided, short ones kept, a ramp between) and `yarn` (Peng et al. 2023,
arXiv:2309.00071). `dynamic` changes the frequencies only when a context is longer than max_position_embeddings; a
request never is, so it equals `default` here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from models.config import Config
from models.errors import ConfigError
from models.parts.basics import Rope

DEFAULT_THETA = 10_000.0
_SPELLINGS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_SCALING_FIELDS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            "factor",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "original_max_position_embeddings",
            "truncate",
        }
    ),
}


def read_rope(
    config: Config,
    head_dim: int,
    max_positions: int,
    *,
    partial: float | None = None,
    unused: Collection[str] = (),
    default_theta: float = DEFAULT_THETA,
) -> Rope:
    """The rotary positions of a head of `head_dim` dimensions.

    `partial` is the family's default for the rotated part of a head; None where the family always rotates all of it.
    `unused` are parameters that do not matter for text. Raises ConfigError for what is not implemented.
    """
    if config.has("original_max_position_embeddings"):
        raise ConfigError("original_max_position_embeddings is only implemented inside the rope parameters")
    parameters = config.section("rope_scaling" if config.has("rope_scaling") else "rope_parameters")
    theta = config.number("rope_theta", default_theta)
    partial_default = config.number("partial_rotary_factor", 1.0 if partial is None else partial)
    return rope_of(parameters, head_dim, max_positions, theta, partial_default, partial is None, unused)


def rope_of(
    parameters: Config,
    head_dim: int,
    max_positions: int,
    default_theta: float,
    default_fraction: float = 1.0,
    whole: bool = True,
    unused: Collection[str] = (),
) -> Rope:
    """The rotary positions that one object of rope parameters describes. `whole`: nothing but all of a head."""
    kind = str(parameters.read("rope_type", parameters.read("type", "default")))
    if kind not in _SCALING_FIELDS:
        raise ConfigError(f"rope_type is {kind!r}; implemented: {', '.join(_SCALING_FIELDS)}")
    unknown = parameters.names() - _SPELLINGS - _SCALING_FIELDS[kind] - frozenset(unused)
    if unknown:
        raise ConfigError(f"rope type {kind!r} has parameters that are not implemented: {', '.join(sorted(unknown))}")

    theta = parameters.number("rope_theta", default_theta)
    fraction = parameters.number("partial_rotary_factor", default_fraction)
    if whole and fraction != 1.0:
        raise ConfigError(f"partial_rotary_factor is {fraction}; this model type rotates whole heads")
    dim = int(head_dim * fraction)
    if dim % 2 or not 0 < dim <= head_dim:
        raise ConfigError(f"partial_rotary_factor {fraction} of head_dim {head_dim} rotates {dim} dimensions")
    return _SCALINGS[kind](parameters, theta, dim, max_positions)


def _plain(theta: float, dim: int) -> list[float]:
    return [theta ** (-index / dim) for index in range(0, dim, 2)]


def _default(parameters: Config, theta: float, dim: int, max_positions: int) -> Rope:
    return Rope(tuple(_plain(theta, dim)))


def _linear(parameters: Config, theta: float, dim: int, max_positions: int) -> Rope:
    factor = _required(parameters, "factor")
    return Rope(tuple(frequency / factor for frequency in _plain(theta, dim)))


def _llama3(parameters: Config, theta: float, dim: int, max_positions: int) -> Rope:
    factor = _required(parameters, "factor")
    low, high = _required(parameters, "low_freq_factor"), _required(parameters, "high_freq_factor")
    original = parameters.integer("original_max_position_embeddings", max_positions)

    def scaled(frequency: float) -> float:
        turns = original * frequency / (2 * math.pi)  # full turns within the original context
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        return (1 - kept) * frequency / factor + kept * frequency

    return Rope(tuple(scaled(frequency) for frequency in _plain(theta, dim)))


def _yarn(parameters: Config, theta: float, dim: int, max_positions: int) -> Rope:
    original = parameters.integer("original_max_position_embeddings", max_positions)
    factor = parameters.number("factor", max_positions / original)

    def boundary(turns: float) -> float:
        """The dimension whose wave makes `turns` full turns within the original context."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = boundary(parameters.number("beta_fast", 32)), boundary(parameters.number("beta_slow", 1))
    if parameters.flag("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = (last - first) or 0.001

    def scaled(index: int, frequency: float) -> float:
        divided = min(max((index - first) / width, 0.0), 1.0)
        return divided * frequency / factor + (1 - divided) * frequency

    frequencies = tuple(scaled(index, frequency) for index, frequency in enumerate(_plain(theta, dim)))
    return Rope(frequencies, parameters.number("attention_factor", _yarn_magnitude(parameters, factor)))


def _yarn_magnitude(parameters: Config, factor: float) -> float:
    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    above, below = parameters.number("mscale", 0), parameters.number("mscale_all_dim", 0)
    return magnitude(above) / magnitude(below) if above and below else magnitude(1.0)


_SCALINGS: dict[str, Callable[[Config, float, int, int], Rope]] = {
    "default": _default,
    "dynamic": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


def _required(parameters: Config, name: str) -> float:
    if not parameters.has(name):
        raise ConfigError(f"the rope parameters lack {name!r}")
    return parameters.number(name, 0.0)
