"""What forward keeps for backward, tensor by tensor: the sum is the formula, the list is the explanation."""

from typing import NamedTuple

from ..run import TrainingRun
from ..units import BLOCK, round_up


class Saved(NamedTuple):
    """One tensor that autograd keeps between forward and backward; `size` is in bytes before rounding."""

    operation: str
    name: str
    size: int
    why: str

    @property
    def bytes(self) -> int:
        """Bytes that the allocator takes for it."""
        return round_up(self.size)


class Letters(NamedTuple):
    """The letters of the formulas for one run. `c` is bytes an element of matrix products, `r` of the residual
    stream.
    """

    s: int
    b: int
    h: int
    a: int
    d: int
    kv: int
    ffn: int
    V: int
    c: int
    r: int

    @property
    def sb(self) -> int:
        """Tokens of one micro-batch."""
        return self.s * self.b


def letters(run: TrainingRun) -> Letters:
    """Bind the letters once: under autocast the residual stream stays in fp32 (r = 4) while matrices multiply in
    16-bit (c = 2).
    """
    model, precision = run.model, run.precision
    return Letters(
        run.seq_len, run.micro_batch, model.hidden, model.heads, model.head_size, model.kv_heads * model.head_size,
        model.ffn, model.vocab, precision.compute, precision.weight,
    )  # fmt: skip


def activation_bytes(run: TrainingRun) -> int:
    """Bytes kept when the forward pass ends, the loss not yet computed. Without recomputation: stem + L blocks +
    norm.
    """
    inside = block_bytes(run) if run.recompute == "none" else block_output(run).bytes
    return sum_bytes(stem_saved(run)) + run.model.layers * inside + sum_bytes(head_saved(run))


def block_bytes(run: TrainingRun) -> int:
    """Bytes that one block keeps for its backward pass, its output (the next one's input) included."""
    return sum_bytes(block_saved(run))


def sum_bytes(saved: list[Saved]) -> int:
    """Bytes of a list of saved tensors."""
    return sum(item.bytes for item in saved)


def stem_saved(run: TrainingRun) -> list[Saved]:
    """Kept by everything before the first block: embeddings and positions."""
    w = letters(run)
    saved = [Saved("embedding", "first block's input", w.r * w.sb * w.h, "first norm")]
    if run.model.family == "gpt2":
        saved.append(Saved("positions", "position indices", 8 * w.s, "which rows get a gradient"))
        saved += dropout_mask(run, w.sb * w.h, "embedding")
    return saved + shared_saved(run)


def shared_saved(run: TrainingRun) -> list[Saved]:
    """Kept once for all blocks: the angles of rotary positions, the mask of eager attention."""
    w = letters(run)
    saved = []
    if run.model.family == "llama":
        saved += [Saved("rotary positions", part, w.c * w.s * w.d, "turn q and k back") for part in ("cosine", "sine")]
    if run.attention == "eager":
        saved.append(Saved("attention", "causal mask", w.s * w.s, "which scores get no gradient"))
    return saved


def block_saved(run: TrainingRun) -> list[Saved]:
    """Kept by one block, in the order of its forward pass.

    In 16-bit, with GPT-2's eager attention, this is s·b·h·(34 + 5·a·s/h) bytes (Korthikanti et al. 2022, eq. 2), plus
    the norms' statistics.
    """
    w = letters(run)
    attention = gpt_attention_saved(run) if run.model.family == "gpt2" else llama_attention_saved(run)
    mlp = gpt_mlp_saved(run) if run.model.family == "gpt2" else llama_mlp_saved(run)
    middle = Saved("attention residual", "second norm's input", w.r * w.sb * w.h, "second norm")
    return [*norm_saved(run, "norm1"), *attention, middle, *norm_saved(run, "norm2"), *mlp, block_output(run)]


def block_output(run: TrainingRun) -> Saved:
    """The residual stream after a block: input of the next norm, and all that full recomputation keeps of a block."""
    w = letters(run)
    return Saved("mlp residual", "next norm's input", w.r * w.sb * w.h, "next norm")


def norm_saved(run: TrainingRun, name: str) -> list[Saved]:
    """A norm's statistics, one fp32 number a token each. Its input is counted where it was made."""
    names = ("mean", "inverse deviation") if run.model.family == "gpt2" else ("inverse root mean square",)
    return [Saved(name, statistic, 4 * letters(run).sb, "normalize again") for statistic in names]


def linear_input(run: TrainingRun, layers: tuple[str, ...]) -> list[Saved]:
    """The h-wide input of linear layers that read one norm: kept once, or under autocast once for each (it caches
    weights only).
    """
    w = letters(run)
    if run.precision.autocast:
        return [Saved(layer, "input, cast to 16-bit", w.c * w.sb * w.h, "gradient of its weights") for layer in layers]
    return [Saved(layers[0], "input", w.c * w.sb * w.h, "gradient of the weights")]


def dropout_mask(run: TrainingRun, elements: int, operation: str) -> list[Saved]:
    """One byte an element that says what was dropped; nothing where nothing is."""
    return [Saved(operation, "dropout mask", elements, "drop the same again")] if run.model.dropout else []


def gpt_attention_saved(run: TrainingRun) -> list[Saved]:
    """11·s·b·h + 5·a·s²·b bytes in 16-bit when eager (Korthikanti et al. 2022, section 4.1); no s² term with a fused
    kernel.
    """
    w = letters(run)
    saved = linear_input(run, ("qkv",))
    if run.attention == "eager":
        saved += eager_saved(run)
    else:
        saved.append(Saved("qkv", "queries, keys, values", 3 * w.c * w.sb * w.h, "attention's backward"))
        saved += fused_saved(run)
    return saved + dropout_mask(run, w.sb * w.h, "attention output")


def llama_attention_saved(run: TrainingRun) -> list[Saved]:
    """Grouped queries make keys and values kv/h as wide; eager and efficient attention repeat them to full width
    first.
    """
    w = letters(run)
    saved = linear_input(run, ("q", "k", "v"))
    if run.attention == "eager":
        return saved + eager_saved(run)
    repeated = run.attention == "efficient" and run.model.kv_heads < run.model.heads
    width = w.h if repeated else w.kv
    saved.append(Saved("rotary positions", "queries", w.c * w.sb * w.h, "attention's backward"))
    saved += [Saved("attention", part, w.c * w.sb * width, "attention's backward") for part in ("keys", "values")]
    return saved + fused_saved(run)


def eager_saved(run: TrainingRun) -> list[Saved]:
    """softmax(q·kᵀ)·v written out. Under autocast softmax and what it keeps are fp32, and the product reads a 16-bit
    copy.
    """
    w = letters(run)
    scores = w.a * w.s * w.s * w.b
    q = w.c * w.sb * w.h
    saved = [Saved("attention", part, q, "q·kᵀ or weights·v") for part in ("queries", "keys", "values")]
    if views_of_qkv(run):
        saved = [Saved("qkv", "queries, keys, values", 3 * q, "q·kᵀ and weights·v")]
    saved.append(Saved("softmax", "attention weights", w.r * scores, "softmax's own backward"))
    saved += dropout_mask(run, scores, "attention weights")
    if run.model.dropout or run.precision.autocast:
        saved.append(Saved("weights·v", "weights as multiplied", w.c * scores, "gradient of v"))
    return [*saved, Saved("output", "input", w.c * w.sb * w.h, "gradient of its weights")]


def views_of_qkv(run: TrainingRun) -> bool:
    """Whether eager attention reads q, k and v in place: of one sequence torch multiplies views, of more it copies
    first.
    """
    return run.model.family == "gpt2" and run.micro_batch == 1


def fused_saved(run: TrainingRun) -> list[Saved]:
    """A fused kernel keeps its output, one fp32 logsumexp a row, and the state of its random numbers (Dao et al.
    2022).
    """
    w = letters(run)
    rows = w.s if run.attention == "flash" else round_up(w.s, 32)  # the efficient kernel pads the rows to 32
    return [
        Saved("attention", "output", w.c * w.sb * w.h, "its backward, and the gradient of the next weights"),
        Saved("attention", "logsumexp", 4 * w.b * w.a * rows, "softmax again, row by row"),
        Saved("attention", "random seed", 16, "drop the same again"),
        Saved("attention", "random offset", 8, "drop the same again"),
    ]


def gpt_mlp_saved(run: TrainingRun) -> list[Saved]:
    """19·s·b·h bytes in 16-bit (Korthikanti et al. 2022, section 4.1)."""
    w = letters(run)
    return [
        *linear_input(run, ("up",)),
        Saved("gelu", "input", w.c * w.sb * w.ffn, "derivative of GELU"),
        Saved("down", "input", w.c * w.sb * w.ffn, "gradient of its weights"),
        *dropout_mask(run, w.sb * w.h, "mlp output"),
    ]


def llama_mlp_saved(run: TrainingRun) -> list[Saved]:
    """SwiGLU keeps four ffn-wide tensors where GELU keeps two."""
    w = letters(run)
    wide = w.c * w.sb * w.ffn
    return [
        *linear_input(run, ("gate", "up")),
        Saved("silu", "input", wide, "derivative of SiLU"),
        Saved("gate · up", "SiLU's output", wide, "gradient of up"),
        Saved("gate · up", "up's output", wide, "gradient of the gate"),
        Saved("down", "input", wide, "gradient of its weights"),
    ]


def head_saved(run: TrainingRun) -> list[Saved]:
    """Kept by the final norm and the head."""
    return [*norm_saved(run, "final norm"), *linear_input(run, ("head",))]


def loss_saved(run: TrainingRun) -> list[Saved]:
    """Kept by cross-entropy: log-softmax in the logits' type, which autocast copies to fp32 for the loss itself."""
    w = letters(run)
    saved = [Saved("log-softmax", "output", w.c * w.sb * w.V, "gradient of the logits")]
    if run.precision.autocast:
        saved.append(Saved("loss", "log-softmax in fp32", 4 * w.sb * w.V, "autocast computes the loss in fp32"))
    return [
        *saved,
        Saved("loss", "weight of all tokens", 4, "mean"),
        Saved("loss", "loss", BLOCK, "where backward begins"),
    ]


def logits_bytes(run: TrainingRun) -> int:
    """Bytes of the logits, s·b·V elements of the compute type: gone when the loss is computed."""
    w = letters(run)
    return round_up(w.c * w.sb * w.V)
