"""The numbers in the quiz of lesson 16, question by question; its words are in quiz.toml."""

from collections.abc import Iterator

from ... import TrainingRun, estimate
from ...estimating.states import trainable
from ...interactive.quiz import Numbers
from ...units import each, percent

RUN = TrainingRun("gpt2", 4, 512, lora_rank=8, lora_targets=("attention", "mlp"))


def numbers() -> Iterator[Numbers]:
    n_out, n_in, r = 11008, 4096, 16
    counts = {"both": r * (n_out + n_in), "one": r * n_in, "product": r * r, "divided": n_out * n_in // r}
    yield "numbers_that_learn", {"n_out": n_out, "n_in": n_in, "r": r} | counts
    runs = RUN.replace(lora_rank=0, lora_targets=()), RUN, RUN.replace(lora_targets=("attention",))
    full, everywhere, attention = (estimate(run)["activations"] for run in runs)
    frozen = 1 - trainable(RUN.model, RUN.lora_rank, RUN.lora_targets).parameters / RUN.model.parameters
    learning = (4 + 8) / (4 + 4 + 8)  # gradients and moments, of these and the weights
    saved = {"activations": 1 - everywhere / full, "attention": 1 - attention / full}
    yield "activations", each(percent, **saved, parameters=frozen, learning=learning)
    forward, backward_x, backward_w = 1, 1, 1  # units of work; recomputation adds a forward
    plain = backward_w / (forward + backward_x + backward_w)
    recomputed = backward_w / (2 * forward + backward_x + backward_w)
    wrong = {"both_products": (backward_x + backward_w) / (2 * forward + backward_x + backward_w)}
    yield "work", each(percent, recomputed=recomputed, plain=plain, nothing=0.0, **wrong)
    few, many = 8, 128
    ratio = many / few
    steps = {"root": ratio**0.5, "scale": ratio, "sum": ratio**1.5}
    yield "first_step", {"few": few, "many": many} | {name: f"{size:.0f}" for name, size in steps.items()}
