"""The numbers in the quiz of lesson 05, question by question; its words are in quiz.toml."""

from collections.abc import Iterator
from functools import partial

from ...estimating.formula import activation_bytes, block_bytes, loss_bytes
from ...estimating.published import korthikanti_block_bytes
from ...interactive.quiz import Numbers
from ...run import TrainingRun
from ...units import each, format_bytes, percent

RUN = TrainingRun("gpt2-xl", 8, 1024, "bf16-master", attention="eager")
_gb = partial(format_bytes, unit="GB", digits=2)


def numbers() -> Iterator[Numbers]:
    total = korthikanti_block_bytes(RUN)
    s, b, h, a = RUN.seq_len, RUN.micro_batch, RUN.model.hidden, RUN.model.heads
    of_scores = 5 * a * s * s * b / total
    rest = 34 * s * b * h / total
    bare = 5 * s / (34 + 5 * s)
    parts = each(percent, scores=of_scores, softmax=2 * a * s * s * b / total, rest=rest, bare=bare)
    yield "scores_of_a_block", {"s": s} | parts
    runs = [RUN.replace(attention=kernel) for kernel in ("flash", "eager")]
    flash, eager = (block_bytes(run) / block_bytes(run.replace(seq_len=512)) for run in runs)
    yield "twice_the_sequence", {"flash": flash, "eager": eager}
    saved = 1 - block_bytes(RUN.replace(dropout=0.0)) / block_bytes(RUN)
    masks = (a * s * s * b + 2 * s * b * h) / block_bytes(RUN)
    shares = each(percent, saved=saved, masks=masks, half_bytes=masks / 2, two_bytes=2 * masks)
    yield "without_dropout", shares
    run = TrainingRun("llama3.2-1b", 4, 2048, "amp-bf16")
    kept = loss_bytes(run)
    logits = run.micro_batch * run.seq_len * run.model.vocab
    sizes = each(_gb, kept=kept, half=2 * logits, twice=8 * logits, blocks=activation_bytes(run))
    yield "share_of_the_loss", {"b": run.micro_batch, "s": run.seq_len} | sizes
