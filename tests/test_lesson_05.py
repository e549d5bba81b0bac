"""Lesson 05: answers to its exercises; its block against the estimate, and the map of activations."""

from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from itertools import product
from typing import Any

import pytest
import torch
from checking import Answers, JudgedAnswers
from lesson_source import SOURCES, cells, names_from_cells
from matplotlib.patches import Rectangle
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from course_utils import PRESETS, TrainingRun, estimate, gpu, on_gpu
from course_utils.estimating.formula import activation_bytes, block_bytes, block_table, loss_bytes
from course_utils.interactive.saved_tensors import saved_by
from course_utils.lessons.activations import checks as lesson_05
from course_utils.lessons.activations.heat_map import BATCHES, heat_map, kept_bytes, lengths, limits
from course_utils.lessons.activations.widget import activation_map
from course_utils.lessons.shared.block_picture import draw_block
from course_utils.lessons.shared.block_trace import trace
from course_utils.lessons.shared.living_block import MLPS, NORMS, Choices, living_block
from course_utils.planning.twin import fit_words
from course_utils.units import format_bytes

# --------------------------------------------------------------------------------------------------
# 05.1: expressions


def asks_autograd(n: int) -> dict[str, int]:
    kept = {name: saved_by(work, (n,), (n,), dtype="bf16") for name, work in lesson_05.EXPRESSIONS.items()}
    return {name: sum(item.bytes for item in items) for name, items in kept.items()}


def derived(tanh: int = 1, relu: int = 1, sigmoid: int = 2, exp: int = 2, each: int = 2) -> Any:
    """An answer that counts so many tensors of n numbers for an expression."""
    counts = (tanh, relu, sigmoid, exp, 1)
    return lambda n: dict(zip(lesson_05.EXPRESSIONS, (each * n * count for count in counts), strict=True))


EXPRESSIONS = Answers(
    right=asks_autograd,
    wrong=[
        (derived(tanh=3), "an addition needs neither of its terms"),
        (derived(sigmoid=3), "which the product needs, too. It is stored once"),
        (derived(each=4), "All are twice too large"),
        (lambda n: derived()(4096), "the same for every n"),
    ],
)

# --------------------------------------------------------------------------------------------------
# 05.2: kept_by_module


def pairs_kept(model: Any, x: Any) -> list[tuple[str, torch.Tensor]]:
    """Each saved tensor with the name of the module that was running, in order."""
    running: list[str] = []
    pairs = []
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: running.append(name)))
        handles.append(module.register_forward_hook(lambda *_: running.pop() and None))
    keep = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: pairs.append((running[-1], tensor)) or tensor, lambda tensor: tensor
    )
    with keep:
        model(x)
    for handle in handles:
        handle.remove()
    return pairs


def added_up(pairs: Any, known: Any, once: bool = True, views: bool = False) -> dict[str, int]:
    seen = {tensor.untyped_storage().data_ptr() for tensor in known}
    sizes: dict[str, int] = {}
    for name, tensor in pairs:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            sizes[name] = sizes.get(name, 0) + (tensor.nbytes if views else storage.nbytes())
            if once:
                seen.add(storage.data_ptr())
    return sizes


def existing(model: Any, x: Any) -> list[torch.Tensor]:
    return [x, *model.parameters(), *model.buffers()]


def all_to_the_model(model: Any, x: Any) -> dict[str, int]:
    return added_up([("", tensor) for _, tensor in pairs_kept(model, x)], existing(model, x))


KEPT_BY_MODULE = Answers(
    right=lambda model, x: added_up(pairs_kept(model, x), existing(model, x)),
    wrong=[
        (lambda m, x: added_up(pairs_kept(m, x), existing(m, x), once=False), "storages more than once"),
        (lambda m, x: added_up(pairs_kept(m, x), existing(m, x), views=True), "the bytes of a view"),
        (lambda m, x: added_up(pairs_kept(m, x), [x, *m.buffers()]), "You count x or parameters, too"),
        (lambda m, x: added_up(pairs_kept(m, x), [x, *m.parameters()]), "You count a buffer"),
        (all_to_the_model, "The outermost module keeps nothing itself"),
    ],
)

# --------------------------------------------------------------------------------------------------
# 05.3: lean


def gated(block: Any, gate: Any, up: Any) -> Any:
    return F.dropout(F.silu(gate) * up, block.rate, block.training)


def again(function: Any, *given: Any, **options: Any) -> Any:
    return checkpoint(function, *given, use_reentrant=False, **options)


def down_inside(block: Any, x: Any) -> Any:
    """The last product in the checkpoint: backward stops before it, once it has its input."""
    normal = block.norm(x)
    y = again(lambda gate, up: block.down(gated(block, gate, up)), block.gate(normal), block.up(normal))
    block.log.append(y.abs().mean().item())
    return x + y


def without_checkpoint(block: Any, x: Any) -> Any:
    normal = block.norm(x)
    y = block.down(gated(block, block.gate(normal), block.up(normal)))
    block.log.append(y.detach().abs().mean())
    return x + y


def other_mask(block: Any, x: Any) -> Any:
    normal = block.norm(x)
    wide = again(gated, block, block.gate(normal), block.up(normal), preserve_rng_state=False)
    y = block.down(wide)
    block.log.append(y.abs().mean().item())
    return x + y


def all_again(block: Any, x: Any) -> Any:
    y = again(lambda x: block.down(gated(block, block.gate(block.norm(x)), block.up(block.norm(x)))), x)
    block.log.append(y.abs().mean().item())
    return x + y


LEAN = Answers(
    right=down_inside,
    wrong=[
        (lambda block, x: block(x), "Your log holds a graph"),
        (without_checkpoint, "one wide tensor too many"),
        (other_mask, "Does the second forward drop the same?"),
        (all_again, "A matrix product runs a second time"),
    ],
)

# --------------------------------------------------------------------------------------------------
# 05.4: LeanLoss


class InPieces(torch.autograd.Function):
    """Sixteen rows at a time in fp32; forward makes the gradient, in 16 bits, which is all that is kept."""

    @staticmethod
    def forward(ctx: Any, logits: Any, targets: Any) -> Any:
        gradient = torch.empty_like(logits)
        count = (targets != -100).sum()
        total = torch.zeros(())
        for rows in torch.arange(len(targets)).split(16):
            with torch.enable_grad():
                piece = logits[rows].float().requires_grad_()
                loss = F.cross_entropy(piece, targets[rows], reduction="sum") / count
            gradient[rows] = torch.autograd.grad(loss, piece)[0].to(logits.dtype)
            total += loss.detach()
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.saved_tensors[0] * grads[0], None


class IgnoresItsGradient(InPieces):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.saved_tensors[0], None


class CountsWithAMask(InPieces):
    """Right, but a simulated GPU does not know how many entries a mask selects."""

    @staticmethod
    def forward(ctx: Any, logits: Any, targets: Any) -> Any:
        return InPieces.forward(ctx, logits, targets) * (targets[targets != -100].numel() > 0)


def test_a_loss_that_no_simulated_gpu_can_run_is_traced_on_the_cpu(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lesson_05.lean_loss(CountsWithAMask)
    assert "Traced on the CPU" in capsys.readouterr().out


def by_checkpoint(logits: Any, targets: Any) -> Any:
    return again(lambda logits: F.cross_entropy(logits.float(), targets), logits)


def exponentials(logits: Any, targets: Any) -> Any:
    rows = targets >= 0
    picked = logits[rows, targets[rows]].float()
    return (logits[rows].float().exp().sum(-1).log() - picked).mean()


LEAN_LOSS = Answers(
    right=InPieces,
    wrong=[
        (lambda logits, targets: F.cross_entropy(logits.float(), targets), "as large as the fp32 copy"),
        (lambda logits, targets: F.cross_entropy(logits, targets), "computed in 16 bits"),
        (by_checkpoint, "at one moment two fp32 tensors"),
        (exponentials, "exp overflows, or you take the log of 0"),
        (IgnoresItsGradient, "Do you multiply by the incoming gradient?"),
    ],
)

ANSWERS = {"05.1": EXPRESSIONS, "05.2": KEPT_BY_MODULE, "05.3": LEAN, "05.4": LEAN_LOSS}


class TestAnswers(JudgedAnswers):
    answers = ANSWERS


# --------------------------------------------------------------------------------------------------
# The lesson's block

HOOKS = ("s, b, h = 1024", "layer = nn.LayerNorm(h)", "def kept_by(")
BLOCK = (*HOOKS, "def eager(", "class Block(", "s, b, h, a = 512", "def flash(", "class SwiGLU(")


@pytest.mark.parametrize(
    ("kernel", "rate", "mlp"), [("eager", 0.1, "gelu"), ("flash", 0.0, "gelu"), ("flash", 0.1, "swiglu")]
)
def test_the_lessons_block_keeps_each_row_of_the_formula(kernel: str, rate: float, mlp: str) -> None:
    names = names_from_cells("05", *BLOCK)
    model = replace(PRESETS["gpt2"], dropout=rate, mlp=mlp, ffn=2048 if mlp == "swiglu" else 3072)
    with on_gpu():
        wide = names["SwiGLU"](768, 2048) if mlp == "swiglu" else None
        block = names["Block"](768, 12, names[kernel], wide, rate=rate)
        x = torch.randn(2, 64, 768, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        kept = names["kept_by"](block.to("cuda", torch.bfloat16), x)
    wanted = block_table(TrainingRun(model, 2, 64, "bf16-master", attention=kernel))
    sizes = sorted(tensor.untyped_storage().nbytes() for tensor in kept)
    seeds = [] if kernel == "eager" else sizes[:2]  # the kernel's random state is in no row
    assert sum(seeds) <= 24
    assert sizes[len(seeds) :] == sorted(wanted.values())


@pytest.mark.parametrize("kernel", ["eager", "flash"])
@pytest.mark.parametrize("autocast", [True, False])
def test_the_picture_of_the_lessons_block_has_each_tensor_that_hooks_find(
    kernel: str, autocast: bool
) -> None:
    names = names_from_cells("05", *BLOCK)
    dtype = torch.float32 if autocast else torch.bfloat16
    with on_gpu():
        block = names["Block"](768, 12, names[kernel]).to("cuda", dtype)
        x = torch.randn(2, 64, 768, device="cuda", dtype=dtype, requires_grad=True)
        block(x)  # for cuBLAS's workspace
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            traced = trace(block, x)
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            figure = draw_block(block, x)
        assert torch.cuda.memory_allocated() == before  # the hooks hold nothing that outlives the block
    choices = Choices(seq_len=64, attention=kernel, autocast=autocast)
    assert traced == choices.traced()
    run = choices.run()
    assert run is not None and 0 <= traced.kept - block_bytes(run) <= 24  # the kernel's random state
    kept = sum(int(row[3].replace(",", "")) for row in figure.rows[1:] if row[4] == "kept")
    assert kept == traced.kept and f"{traced.kept / traced.numbers:.1f} · s·b·h" in figure.alt
    large = [made for step in traced.operations for made in step.makes if made.bytes > 0.1 * traced.numbers]
    bars = [patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle)]
    assert len(bars) == len(large)
    assert sum(bar.get_facecolor() != (1, 1, 1, 1) for bar in bars) == sum(made.kept for made in large)


def test_a_trace_knows_who_makes_and_who_reads() -> None:
    block = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    traced = trace(block, torch.randn(3, 8, requires_grad=True))
    found = [(step.module, step.name, [*step.reads]) for step in traced.operations]
    assert found[0] == ("", "input x", []) and found[1] == ("0", "linear layer", [0])
    assert found[2:] == [("1", "relu", [1]), ("2", "linear layer", [2])]
    assert [step.makes[0].kept for step in traced.operations] == [True, False, True, False]
    assert traced.kept == 4 * (3 * 8 + 3 * 16)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("mlp", MLPS)
def test_each_choice_of_the_living_block_agrees_with_the_closed_form_that_covers_it(
    norm: str, mlp: str
) -> None:
    for kernel, autocast, rate in product(("eager", "flash"), (True, False), (0.1, 0.0)):
        choices = Choices(2, 64, kernel, autocast, rate, norm, mlp)
        run = choices.run()
        assert (run is None) == ("single" in norm + mlp)
        if run is not None:
            assert choices.traced().kept - block_bytes(run) == (24 if kernel == "flash" else 0)


def test_the_living_block_follows_its_controls() -> None:
    shown = living_block(attention="flash", seq_len=128)
    before, message = shown.picture.value, shown.message
    assert "<b>6.70 MB</b>" in message and "the gap: −24 B" in message
    shown.controls["norm"].value = "LayerNorm, in single operations"
    assert "no rows for single operations" in shown.message and shown.picture.value != before
    with pytest.raises(ValueError, match="unknown attention 'math'"):
        living_block(attention="math")


# --------------------------------------------------------------------------------------------------
# What the learner writes


def said_by(code: str, names: dict[str, Any], changes: dict[str, str]) -> str:
    """What the lesson's cell with `code` prints last, once a learner has made these changes."""
    [cell] = [cell for cell in cells(SOURCES / "05_activations.py") if code in cell]
    for before, after in changes.items():
        assert before in cell
        cell = cell.replace(before, after)
    with redirect_stdout(StringIO()) as printed:
        exec(cell, dict(names))
    return printed.getvalue().splitlines()[-1]


def test_what_the_learner_derives_for_four_operations_is_judged_at_once() -> None:
    names = names_from_cells("05", *HOOKS)
    assert said_by("mine |=", names, {}) == "Not yet: softmax, dropout, LayerNorm, product of two."
    most = {
        '"softmax": 0': '"softmax": 2',
        '"dropout": 0': '"dropout": 1',
        '"LayerNorm": 0': '"LayerNorm": 2',
    }
    assert said_by("mine |=", names, most) == "Not yet: product of two."
    assert said_by("mine |=", names, most | {'two": 0': 'two": 4'}) == "Right."


def test_what_the_learner_writes_for_chunks_is_judged_at_once() -> None:
    loss = ("s, b, h, V = 1024", "def chunked_loss(head, x", "peaks = {}")
    names = names_from_cells("05", *HOOKS, *loss)
    assert said_by("def falls(c)", names, {}) == "Not yet: for 8 chunks you are off by 100%."
    one = {"return 0": "return 2 * s * b * V * (1 - 1 / c)"}
    assert said_by("def falls(c)", names, one) == "Not yet: for 8 chunks you are off by 66%."
    assert said_by("def falls(c)", names, {"return 0": "return 6 * s * b * V * (1 - 1 / c)"}) == "Right."


# --------------------------------------------------------------------------------------------------
# The map


def test_the_map_has_every_cell_that_the_model_takes_and_a_line() -> None:
    run = TrainingRun("gpt2")
    figure: Any = heat_map(run, gpu("A100-80GB"), (4, 512))
    assert max(lengths(run)) == run.model.max_positions == 1024
    (cells,) = figure.axes[0].collections
    wanted = [[kept_bytes(run.replace(micro_batch=b, seq_len=s)) for s in lengths(run)] for b in BATCHES]
    assert cells.get_array().tolist() == wanted
    one = run.replace(micro_batch=BATCHES[0], seq_len=lengths(run)[0])
    assert wanted[0][0] == activation_bytes(one) + loss_bytes(one)
    line, frame = figure.axes[0].patches
    assert line.get_data().values.tolist() == limits(run, gpu("A100-80GB").room)
    assert (lengths(run)[frame.get_x()], BATCHES[frame.get_y()]) == (512, 4)
    shown = [text.get_text() for text in figure.axes[0].texts]
    numbered = [size for row in figure.rows[1:-1] for size in row[1::2]]
    assert shown == numbered and len(figure.rows) == 2 + len(BATCHES)
    most = [BATCHES[count - 1] for count in limits(run, gpu("A100-80GB").room)]
    assert figure.rows[-1] == ["largest b that fits", *map(str, most)]
    assert (
        "No step of gpt2-xl fits on T4-16GB" in heat_map(TrainingRun("gpt2-xl"), gpu("T4-16GB"), (1, 128)).alt
    )


@pytest.mark.parametrize("memory", [0, 16 * 10**9, 10**15])
def test_the_line_is_where_one_more_does_not_fit(memory: int) -> None:
    run = TrainingRun("gpt2", 1, 512)
    count = limits(run, memory)[lengths(run).index(512)]
    peaks = [estimate(run.replace(micro_batch=b)).total for b in BATCHES]
    assert [peak <= memory for peak in peaks] == [True] * count + [False] * (len(BATCHES) - count)


def test_the_map_follows_its_sliders_and_says_what_the_cell_looked_at_takes() -> None:
    shown = activation_map("llama3.2-1b", gpu="A100-80GB")
    before = shown.picture.value
    for name, value in {"micro_batch": 8, "seq_len": 32768, "attention": "eager", "model": "gpt2-xl"}.items():
        shown.controls[name].value = value
    run = TrainingRun("gpt2-xl", 8, 1024, attention="eager")
    assert shown.run == run and shown.picture.value != before
    assert shown.message.startswith("gpt2-xl has fewer than 32,768 positions, so: 8 × 1,024 tokens")
    for size in (kept_bytes(run), estimate(run).total):
        assert format_bytes(size, "GB", 2) in shown.message
    assert fit_words(estimate(run).total, gpu("A100-80GB")) in shown.message and run.code() in shown.message
    shown.controls["model"].value = "llama3.2-1b"
    assert shown.run.seq_len == 32768 and "positions" not in shown.message
    with pytest.raises(ValueError, match="seq_len is 1000; the map has 128, 192"):
        activation_map(seq_len=1000)
