"""Sliders that build a transformer, and a picture of its parameters. Only notebooks import this module."""

from fractions import Fraction

from ... import TransformerConfig, format_bytes
from ...interactive.html_bars import Picture
from ...interactive.widgets import SliderBox, dropdown, slider
from ...model_files import model_config
from .counting import parts_of
from .figures import percent, shares, spelled

LAYERS = (1, 2, 4, 6, 8, 12, 16, 22, 24, 28, 32, 36, 48, 64, 80, 96, 128)
HIDDEN_SIZES = (
    128, 256, 512, 768, 1024, 1280, 1600, 2048, 2560,
    3072, 3584, 4096, 5120, 6144, 8192, 12288, 16384,
)  # fmt: skip
VOCABULARIES = (256, 1000, 4096, 16000, 32000, 50257, 65536, 100_000, 128_256, 152_064, 200_000, 256_000)
HEADS = (1, 2, 4, 8, 12, 16, 20, 24, 25, 28, 32, 40, 48, 64, 96, 128)
GROUPS = (1, 2, 4, 7, 8, 16, 32)
# of h; 8/3 makes SwiGLU's 3 matrices as large as GELU's 2 at 4
MLP_WIDTHS = ("8/3", "2.75", "3", "3.5", "4", "5.5")


class ModelBuilder(SliderBox):
    """Controls for the sizes of a transformer, and a picture of its parameters; `.model` is what was built.

    It begins with a preset; ValueError for one that is not known.
    """

    invitation = "Sliders that build a model: run this cell to use them."

    def __init__(self, start: str = "gpt2") -> None:
        self.first = model = model_config(start)
        factors = (text for text in MLP_WIDTHS if _of_hidden(text, model.hidden) == model.ffn)
        width = next(factors, str(model.ffn))
        controls = {
            "family": dropdown("family", ("gpt2", "llama"), model.family),
            "tied": dropdown("head", ("tied", "untied"), "tied" if model.tied else "untied"),
            "layers": slider("layers L", LAYERS, model.layers, continuous=False),
            "vocab": slider("vocabulary V", VOCABULARIES, model.vocab, continuous=False),
            "hidden": slider("hidden h", HIDDEN_SIZES, model.hidden, continuous=False),
            "ffn": dropdown("MLP width / h", MLP_WIDTHS, width),
            "heads": slider("heads a", HEADS, model.heads, continuous=False),
            "experts": slider("experts", (1, 2, 4, 8, 16, 32, 64, 128), model.experts or 1, continuous=False),
            "group": slider("queries per key", GROUPS, model.heads // model.kv_heads, continuous=False),
        }
        super().__init__(controls)

    @property
    def model(self) -> TransformerConfig:
        """The transformer that has been chosen. Raises ValueError for sizes that make none."""
        chosen = {name: control.value for name, control in self.controls.items()}
        experts = chosen.pop("experts")
        group = chosen.pop("group")
        if chosen["heads"] % group:
            raise ValueError(f"{chosen['heads']} query heads do not come in groups of {group}")
        chosen["kv_heads"] = chosen["heads"] // group
        chosen["max_positions"] = self.first.max_positions
        chosen["ffn"] = _of_hidden(chosen["ffn"], chosen["hidden"])
        chosen["tied"] = chosen["tied"] == "tied"
        if experts > 1:
            chosen |= {"experts": experts, "experts_per_token": 2}
        if chosen["family"] == self.first.family:
            chosen["qkv_bias"] = self.first.qkv_bias
        return TransformerConfig("built", **chosen)

    def redraw(self) -> tuple[Picture, str]:
        """Return the model's parts as a bar, and its count next to what 12Lh² would say."""
        model = self.model
        parts = parts_of(model)
        N = model.parameters
        rule = 12 * model.layers * model.hidden**2
        largest = max(parts, key=parts.__getitem__)
        where = largest if largest in ("attention", "positions", "norms") else f"the {largest}"
        title = f"{spelled(N)} parameters, {percent(parts[largest], N)} of them in {where}"
        active = f"; a token uses {model.active_parameters:,} of them" if model.experts else ""
        states = format_bytes(16 * N, "GB", 1)
        off = f"{100 * (rule / N - 1):+.1f} % off".replace("-", "−")
        message = (
            f"<b>N = {N:,}</b>{active}. 12·L·h² gives {rule:,}: {off}.<br>"
            f"Training with Adam takes 16 bytes per parameter: {states} of weights, gradients and states."
        )
        return shares({"": parts}, title), message


model_builder = ModelBuilder


def _of_hidden(width: str, hidden: int) -> int:
    """A width in numbers per token: "8/3" and the like are factors of `hidden`, 64 or more is it itself."""
    factor = Fraction(width)
    return round(factor * hidden) if factor < 64 else round(factor)
