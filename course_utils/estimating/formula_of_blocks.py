"""A block of the transformer as a table: what each operation keeps for backward, and what its backward makes.

A row is one operation, or a few that belong together. Backward visits the rows from the last to the first.
While it is at one, there are the tensors that the rows up to it keep, the gradients on their way, and the
gradients of the weights that it has passed. The peak within a block is the largest of these sums.

torch/tools/autograd/derivatives.yaml says what an operation keeps; Korthikanti et al. 2022, section 4.1, adds
it up for GPT-2's block, in 16 bits s·b·h·(34 + 5·a·s/h) bytes, and section 4.2 for ranks that share it.
"""

from typing import NamedTuple

from ..run import TrainingRun
from ..units import round_up
from .workspaces import installed_torch

Bytes = dict[str, int]


class Row(NamedTuple):
    """One operation, in bytes.

    `keeps` are the tensors that it keeps for backward, by name, `reads` those that another row keeps for it.
    While its backward runs it `makes` gradients and temporary tensors, besides the gradients that came to it.
    Afterwards those `left` are on their way, the gradient of so many `weights` has arrived, and autocast's
    `copy` of them goes. A row that `stands_for_many` is passed over: memory is higher before or after it.
    """

    name: str
    keeps: Bytes
    makes: int
    left: int
    weights: int = 0
    reads: int = 0
    copy: int = 0
    stands_for_many: bool = False


class Letters(NamedTuple):
    """Sizes that the rows of a run share, of one rank; from X on they are bytes of tensors.

    Of a micro-batch's `t` tokens, sequence parallelism leaves `u` in the residual stream. Bytes per element
    are `c` in matrix products, `r` in the residual stream, `n` after a norm. Widths are `h`, `q`, `kv`, `f`;
    there are `a` heads. `X` is a tensor of the residual stream, `N` one after a norm, `H` the same as matrix
    products take it; `Q` has the queries, `K` the keys, `F` is as wide as the MLP.
    """

    t: int
    u: int
    c: int
    r: int
    n: int
    h: int
    q: int
    kv: int
    f: int
    a: int
    X: int
    N: int
    H: int
    Q: int
    K: int
    F: int


def letters(run: TrainingRun) -> Letters:
    """The letters of `run`. Tensor parallelism cuts heads and the MLP (Shoeybi et al. 2019, section 3)."""
    m = run.model
    T = run.tensor_parallel
    t = run.micro_batch * run.seq_len
    u = t // T if run.sequence_parallel else t
    c = run.precision.compute
    r = residual(run)
    n = norm_element(run)
    h, q, kv, f = m.hidden, m.hidden // T, -(-m.kv // T), m.ffn // T
    streams = (r * u * h, n * u * h, c * u * h)
    return Letters(t, u, c, r, n, h, q, kv, f, m.heads // T, *streams, c * t * q, c * t * kv, c * t * f)


def residual(run: TrainingRun) -> int:
    """r, bytes per element of the residual stream: fp32 under autocast, unless frozen weights are 16-bit."""
    if run.precision.autocast and run.frozen_bits is None:
        return 4
    return run.precision.compute


def norm_element(run: TrainingRun) -> int:
    """n, bytes per element of what a norm gives: those of its input, but autocast computes in fp32.

    RMSNorm does so from torch 2.12 on (pytorch's issue 188955).
    """
    r = residual(run)
    if not run.precision.autocast or in_single_operations(run):
        return r
    return 4 if run.model.norm == "layernorm" or installed_torch() >= (2, 12) else r


def in_single_operations(run: TrainingRun) -> bool:
    """True where RMSNorm is no single kernel."""
    return run.model.unfused and run.model.norm == "rmsnorm"


def block(run: TrainingRun) -> list[Row]:
    """The rows of one block in the order of forward: norm, attention, norm, MLP or experts."""
    x = letters(run)
    middle = experts(run, x) if run.model.experts else wide_part(run, x, x.t, x.X)
    return [
        *norm(run, x, "norm1"),
        *attention(run, x),
        *joining(run, x, "attention output"),
        *norm(run, x, "norm2"),
        *middle,
        *joining(run, x, "MLP"),
    ]


def kept(rows: list[Row]) -> int:
    """Bytes that the rows keep for backward."""
    return sum([size for row in rows for size in row.keeps.values()])


def table(rows: list[Row]) -> Bytes:
    """The tensors that the rows keep, by operation and name."""
    return {f"{row.name}: {name}": size for row in rows for name, size in row.keeps.items()}


# What both halves of a block have


def norm(run: TrainingRun, x: Letters, name: str) -> list[Row]:
    """A norm keeps its input and fp32 statistics: mean and deviation, or RMSNorm's one number."""
    if in_single_operations(run):
        return norm_in_single_operations(run, x, name)
    statistics = ("mean", "deviation") if run.model.norm == "layernorm" else ("root",)
    keeps = {"input": x.N} | dict.fromkeys(statistics, 4 * x.u)
    if x.n == x.r:
        return [Row(name, keeps, x.N, x.X)]
    return [Row(f"{name}, cast", {}, x.X, x.X), Row(name, keeps, x.N, x.X + x.N)]


def norm_in_single_operations(run: TrainingRun, x: Letters, name: str) -> list[Row]:
    """w · x/√(mean(x²) + ε), in fp32 but for the last product. Backward of the power makes three tensors."""
    W = 4 * x.u * x.h
    narrow = x.r == 2
    trained = not run.lora_rank
    rows = [
        Row(f"{name}, power", {"input": W, "root": 4 * x.u}, 3 * W, x.X + W),
        Row(f"{name}, mean", {}, W, x.X + 2 * W),
        Row(f"{name}, times root", {}, 2 * W, x.X + W),
    ]
    if narrow:
        rows.insert(0, Row(f"{name}, cast", {}, x.X, x.X))
        rows.append(Row(f"{name}, cast back", {}, W, x.X + W))
    keeps = {"normed input": x.X} if trained else {}
    return [*rows, Row(f"{name}, times weight", keeps, 2 * x.X if trained else x.X, 2 * x.X)]


def joining(run: TrainingRun, x: Letters, name: str) -> list[Row]:
    """Dropout keeps a byte per element; the sum with the residual stream casts the gradient back."""
    rows = []
    if run.model.dropout:
        rows.append(Row(f"{name}, dropout", {"mask": x.u * x.h}, x.H, x.X + x.H))
    if x.r != x.c:
        rows.append(Row(f"{name}, sum", {}, x.H, x.X + x.H))
    return rows


class Product(NamedTuple):
    """A product of tokens and a matrix, (t, n_in)·(n_in, n_out), and the gradients in backward around it.

    `given` are bytes per element of its input where that comes from a norm. Other gradients that `wait` are
    in bytes; if it `meets` one of its own input, that is among them. `shares`: another row keeps the input.
    """

    name: str
    t: int
    n_in: int
    n_out: int
    waits: int
    given: int = 0
    meets: bool = False
    shares: bool = False
    in_place: bool = False


def product(run: TrainingRun, x: Letters, p: Product) -> list[Row]:
    """A product keeps its input, under autocast a 16-bit copy; backward makes gradients of both factors."""
    if run.lora_rank:
        return product_with_frozen_matrix(run, x, p)
    weights = p.n_in * p.n_out
    narrow = x.c * p.t * p.n_in
    casts = p.given not in (0, x.c)
    waiting = p.waits if p.meets else p.waits + (p.given * p.t * p.n_in if casts else narrow)
    keeps = {} if p.shares else {"input": x.H if p.given and p.t == x.t else narrow}
    made = x.c * weights  # the matrix's gradient, which may become one of another type
    becomes = run.precision.gradient != x.c
    waits = made if becomes and (run.precision.autocast or not run.accumulates) else 0
    rows = []
    if waits:
        rows.append(Row(f"{p.name}, its weights' gradient cast", {}, 0, waiting, weights))
    if casts:
        rows.append(Row(f"{p.name}, cast", {}, p.given * p.t * p.n_in, waiting + waits))
    left = (p.waits + narrow if casts else waiting) + waits
    # Gradients of one input that are views, as those of all tokens are, are added in a third tensor. Where
    # the input goes first, it takes its place.
    third = narrow if p.meets and p.shares and not casts and not p.in_place else 0
    makes = narrow + third + (made if becomes else 0)
    reads = narrow if p.shares else 0
    copy = made if run.precision.autocast else 0
    rows.append(Row(p.name, keeps, makes, left, 0 if becomes else weights, reads, copy))
    return rows


def product_with_frozen_matrix(run: TrainingRun, x: Letters, p: Product) -> list[Row]:
    """A frozen matrix keeps no input. In 8 or 4 bits it is made 16-bit, in forward and again in backward.

    LoRA's A keeps the input, B what A gives: W·x + B·A·x (Hu et al. 2022, section 4.1).
    """
    narrow = x.c * p.t * p.n_in
    casts = p.given not in (0, x.c)
    wide = p.given * p.t * p.n_in
    waiting = p.waits if p.meets else p.waits + (wide if casts else narrow)
    dense = x.c * p.n_in * p.n_out if run.frozen_bits in (4, 8) else 0
    index = dense if run.frozen_bits == 4 else 0  # 4 bytes for each byte, which has two weights
    R = run.lora_rank
    inner = x.c * p.t * R
    came = 0
    rows = []
    if p.name in run.lora_targets:
        came = x.c * p.t * p.n_out  # waits for B
        if casts:
            rows.append(Row(f"{p.name}, A's cast", {}, wide, waiting))
        keeps = {} if p.shares else {"input": narrow}
        more = narrow if p.shares and not casts else 0  # as in `product`
        left = waiting + (narrow if casts else 0)
        cast = x.c if run.precision.autocast else 0
        reads = narrow if p.shares else 0
        rows.append(Row(f"{p.name}, A", keeps, narrow + more, left, R * p.n_in, reads, cast * R * p.n_in))
        of_B = (R * p.n_out, 0, cast * R * p.n_out)
        rows.append(Row(f"{p.name}, B", {"A's": inner}, inner, waiting + inner, *of_B))
    third = narrow if p.meets and not casts else 0
    if casts:
        rows.append(Row(f"{p.name}, cast", {}, wide, waiting + came))
    left = (p.waits + narrow if casts else waiting) + came
    copy = x.c * p.n_in * p.n_out if x.r != x.c else 0
    rows.append(Row(p.name, {}, dense + max(index, narrow + third), left, copy=copy))
    return rows


def keepers(run: TrainingRun, x: Letters, names: tuple[str, ...]) -> list[str]:
    """The matrices that keep an input that all of them read: the first, or each if it casts its own copy.

    With LoRA those that it adapts.
    """
    keeping = [name for name in names if not run.lora_rank or name in run.lora_targets]
    return keeping if x.n != x.c else keeping[:1]


# Attention


def attention(run: TrainingRun, x: Letters) -> list[Row]:
    """Products for q, k and v, rotary positions, the core, the output's product."""
    gradients = x.Q + 2 * x.K
    rows = []
    if run.model.fused_qkv:
        rows += product(run, x, Product("qkv", x.t, x.h, x.q + 2 * x.kv, x.X, x.n))
        rows.append(Row("split", {}, gradients, x.X + gradients))
    else:
        keeping = keepers(run, x, ("q", "k", "v"))
        for name, width, waits in (("q", x.q, x.N), ("k", x.kv, x.N + x.Q), ("v", x.kv, x.Q + x.K)):
            p = Product(name, x.t, x.h, width, x.X + waits, x.n, name != "v", name not in keeping)
            rows += product(run, x, p)
    if run.model.positions == "rotary":
        rows.append(Row("rotary positions", {}, 5 * x.Q // 2, x.X + gradients))
    core = eager(run, x) if run.attention == "eager" else kernel(run, x)
    again = run.recompute == "selective-attention"
    shares = run.attention != "eager" and not again
    output = product(run, x, Product("out", x.t, x.q, x.h, x.X, shares=shares))
    return [*rows, *(run_again(run, x, core) if again else core), *output]


def run_again(run: TrainingRun, x: Letters, core: list[Row]) -> list[Row]:
    """The core of attention under a checkpoint: its inputs are kept, all else comes back before its backward.

    Korthikanti et al. 2022, section 5.
    """
    m = run.model
    inputs = x.Q + 2 * x.K
    if m.fused_qkv and m.positions == "rotary":
        inputs += x.Q + x.K
    as_they_are = run.attention != "eager" or 1 in (run.micro_batch, m.heads)
    if not as_they_are:
        shared = 0
    else:
        shared = inputs if not repeats(run) or (m.fused_qkv and m.positions != "rotary") else x.Q
    again = kept(core) - shared
    return [
        Row("inputs of attention", {"inputs": inputs - shared}, 0, core[0].left),
        *core,
        Row("attention, run again", {"not kept": -again}, 0, x.X + x.Q),
    ]


def repeats(run: TrainingRun) -> bool:
    """True if keys and values are repeated for every query head."""
    m = run.model
    return m.kv_heads < m.heads and (run.attention in ("eager", "efficient") or m.repeat_kv)


def queries_keys_values(run: TrainingRun, x: Letters) -> Bytes:
    """q, k and v as attention keeps them: parts of one tensor, or tensors of their own.

    Rotary positions make new queries and keys, products of matrices new copies of all unless there is one
    sequence or one head, and repetition makes new keys and values.
    """
    parts = parts_as_they_are(run)
    keys = x.Q if repeats(run) else x.K
    sizes = {"queries": x.Q, "keys": keys, "values": keys}
    if run.model.fused_qkv and any(parts.values()):
        own = {name: size for name, size in sizes.items() if not parts[name]}
        return {"queries, keys and values": x.Q + 2 * x.K} | own
    return sizes


def parts_as_they_are(run: TrainingRun) -> dict[str, bool]:
    """True for queries, keys or values that are kept as their product made them."""
    as_they_are = run.attention != "eager" or 1 in (run.micro_batch, run.model.heads)
    turned = run.model.positions == "rotary"
    repeated = repeats(run)
    return {
        "queries": as_they_are and not turned,
        "keys": as_they_are and not turned and not repeated,
        "values": as_they_are and not repeated,
    }


def kernel(run: TrainingRun, x: Letters) -> list[Row]:
    """A fused kernel keeps q, k, v, its output and one fp32 logsumexp per row and head (Dao et al. 2022).

    Flash's backward has the gradient of q in fp32 and a number for each row besides, of shared keys and
    values the gradients for every head; rows and heads fill tiles (mha_bwd in torch's flash_api.cpp). The
    efficient kernel pads rows to 32.
    """
    b, s, d = run.micro_batch, run.seq_len, run.model.head_size
    keys = x.Q if repeats(run) else x.K
    rows = round_up(s, 32) if run.attention == "efficient" else s
    keeps = queries_keys_values(run, x) | {"output": x.Q, "logsumexp": 4 * b * x.a * rows}
    scratch = 0
    if run.attention == "flash":
        tiles = 4 * b * x.a * round_up(s, 128)
        scratch = tiles + tiles * round_up(d, 32 if d <= 128 else 64)
        scratch += 2 * x.Q if keys < x.Q else 0
    core = Row("attention", keeps, x.Q + 2 * keys + scratch, x.X + x.Q + 2 * keys)
    if not repeats(run):
        return [core]
    return [Row("repetition", {}, 2 * x.K, x.X + x.Q + 2 * x.K), core]


def eager(run: TrainingRun, x: Letters) -> list[Row]:
    """Written out: softmax, mask and weights, 5·a·s²·b in 16 bits (Korthikanti et al. 2022, section 4.1).

    Under autocast softmax is in fp32, and next to RMSNorm in single operations, which casts it back. Its
    backward has its output, the gradient that came, their product and the gradient that goes.
    """
    p = run.precision
    S = x.t * x.a * run.seq_len
    cast_back = in_single_operations(run) and x.c == 2
    w = 4 if cast_back or p.autocast else x.c  # of softmax
    e = x.c if cast_back else w  # of what dropout gets
    casts = w != x.c and not p.loss_scaling  # CUDA's softmax of fp16 writes fp32 itself (SoftMax.cpp)
    goes = w if casts else x.c
    qkv = queries_keys_values(run, x)
    values = {"values": qkv.pop("values")} if "values" in qkv else {}
    flow = x.X + x.Q  # with the gradient of v
    narrow = Row("", {}, x.c * S, flow + x.c * S)
    wide = Row("", {}, e * S, flow + e * S)
    rows = [
        Row("q·kᵀ", qkv, 2 * x.Q, x.X + 3 * x.Q),
        narrow._replace(name="scale"),
        narrow._replace(name="mask"),
    ]
    if casts:
        rows.append(narrow._replace(name="cast to fp32"))
    rows.append(Row("softmax", {"softmax": w * S}, (w + goes) * S, flow + goes * S))
    if cast_back:
        rows.append(Row("cast back", {}, w * S, flow + w * S))
    if run.model.dropout:
        rows.append(wide._replace(name="attention dropout", keeps={"mask": S}))
    if e != x.c:
        rows.append(wide._replace(name="cast to 16 bits"))
    weights = {"weights": x.c * S} if run.model.dropout or e != x.c or cast_back else {}
    return [*rows, Row("weights·v", weights | values, x.c * S + x.Q, flow + x.c * S)]


# MLP


def wide_part(run: TrainingRun, x: Letters, t: int, waits: int, of_expert: bool = False) -> list[Row]:
    """The matrices of an MLP and what is between them, for all tokens or for those of an expert.

    GELU keeps its input, SwiGLU its gate before and after SiLU and up.
    """
    F = x.c * t * x.f
    N = x.n * t * x.h
    down = product(run, x, Product("down", t, x.f, x.h, waits, in_place=of_expert))
    if run.model.mlp == "gelu":
        up = product(run, x, Product("up", t, x.h, x.f, waits, x.n, in_place=of_expert))
        if run.model.unfused:
            return [*up, *gelu_in_single_operations(run, x, t, waits), *down]
        return [*up, Row("GELU", {"input": F}, F, waits + F), *down]
    keeping = keepers(run, x, ("gate", "up"))
    gate = Product("gate", t, x.h, x.f, waits + N, x.n, True, "gate" not in keeping, of_expert)
    up = Product("up", t, x.h, x.f, waits + F, x.n, False, "up" not in keeping, of_expert)
    return [
        *product(run, x, gate),
        Row("SiLU", {"input": F}, F, waits + F + N),
        *product(run, x, up),
        Row("gate · up", {"SiLU": F, "up": F}, 2 * F, waits + 2 * F),
        *down,
    ]


def gelu_in_single_operations(run: TrainingRun, x: Letters, t: int, waits: int) -> list[Row]:
    """½·x·(1 + tanh(√(2/π)·(x + 0.044715·x³))): autocast computes the power in fp32, and all that follows."""
    F = x.c * t * x.f
    casts = bool(run.precision.autocast)
    W = 4 * t * x.f if casts else F
    cast = F if casts else 0
    rows = [
        Row("GELU, half", {}, F, waits + F),
        Row("GELU, power", {"input": W}, 3 * W, waits + 2 * F),
        Row("GELU, sum", {}, W + cast, waits + 2 * F + W),
        Row("GELU, scale", {}, W, waits + F + W),
        Row("GELU, tanh", {"tanh": W}, W, waits + F + W),
        Row("GELU, product", {"half": F, "1 + tanh": W}, 2 * W + cast, waits + F + W),
    ]
    return [*rows, Row("GELU, cast", {}, W, waits + W)] if casts else rows


# Experts


def experts(run: TrainingRun, x: Letters) -> list[Row]:
    """A router, and E MLPs that share t·k pairs of a token and a choice (Jiang et al. 2024, section 2.1).

    The first has one pair more than the last if E does not divide them. Those between keep what is left of
    all, and memory runs along a straight line through them.
    """
    m = run.model
    E = m.experts
    pairs = x.t * m.experts_per_token
    share = -(-pairs // E)
    first = expert(run, x, share, x.X + x.N)
    last = expert(run, x, pairs // E, x.X)
    per_pair = kept(first) // share
    between = {"all that they keep": (pairs - share - pairs // E) * per_pair}
    others = (E - 2) * (3 if m.mlp == "swiglu" else 2) * x.h * x.f
    copy = x.c * others if run.precision.autocast else 0
    choices = {"probabilities": 4 * x.t * E, "choices": 16 * pairs, "shares": 4 * (pairs + x.t)}
    router = Product("router", x.t, x.h, E, x.X + x.N, x.n, True)
    return [
        *product(run, x, router),
        Row("choices", choices, 0, x.X + x.N),
        *first,
        Row("experts between", between, 0, x.X + x.N, others, copy=copy, stands_for_many=True),
        *last,
    ]


def expert(run: TrainingRun, x: Letters, pairs: int, waits: int) -> list[Row]:
    """One expert: its tokens' rows, its MLP, its output times the tokens' weights, added to the sum.

    The gradient of its tokens is as large as all tokens. It keeps what it adds, as index_add_ does.
    """
    output = x.c * pairs * x.h
    weighted = x.r * pairs * x.h
    cast = output if x.r != x.c else 0
    weighing = {"output": output, "weights": x.r * pairs}
    return [
        Row("tokens of an expert", {"which": 8 * pairs}, x.N, x.X + x.N),
        *wide_part(run, x, pairs, waits, of_expert=True),
        Row("weights of an expert", weighing, 2 * weighted + cast, waits + output),
        Row("sum of experts", {"weighted output": weighted}, weighted, waits + weighted),
    ]
