"""Every configuration that a test makes comes from here: what the library calls them stands in one place."""

from typing import Any

from anybit.config import LayerSpec, QuantizeConfig, TileSpec

Options = QuantizeConfig  # what `anybit.quantize` takes, as the tests' signatures name it


def options(
    method: str = "anybit", bits: float | None = None, group_size: int | None = None, **rest: Any
) -> Options:
    """What decides an artifact's bytes; what is left out is the method's default."""
    return QuantizeConfig(method, bits, group_size, **rest)


def changed(config: Options, **rest: Any) -> Options:
    """The same options but for these; defaults that hang on them are decided anew."""
    return QuantizeConfig(**{**config.__dict__["_given"], **rest})


def spec_of(config: Options) -> LayerSpec:
    """How each layer is quantized with these options."""
    return config.layer_spec()


def layer_spec(
    bits: float | None = None,
    group_size: int = 128,
    symmetric: bool = False,
    *,
    tiles: tuple[TileSpec, ...] | None = None,
    **rest: Any,
) -> LayerSpec:
    """How one layer is quantized: in one tile, or in these `tiles`; with neither, as a layer is by default."""
    if tiles is not None:
        assert (bits, group_size, symmetric) == (None, 128, False), "tiles say their own widths and groups"
        return LayerSpec(tiles=tiles, **rest)
    return LayerSpec(tiles=(TileSpec(4 if bits is None else bits, group_size, symmetric),), **rest)
