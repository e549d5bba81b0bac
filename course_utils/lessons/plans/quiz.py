"""Lesson 14, will it fit: the room on a card, what changes the training, where time is lost, reading a message."""

from functools import partial

from course_utils import TrainingRun, estimate, gpu
from course_utils.interactive.quiz import Question, gb, question
from course_utils.planning.twin import SAFETY
from course_utils.units import GB, GiB, format_bytes

XL = TrainingRun("gpt2-xl", 32, 1024)
_gb, _mib = (partial(format_bytes, unit=unit, digits=0) for unit in ("GB", "MiB"))


def questions() -> tuple[Question, ...]:
    """The questions in the order of the lesson."""
    card = gpu("A100-80GB")
    room = question(
        "How large may the estimated peak of a plan for an A100 80GB be, with 5 % in reserve?",
        (gb(round(card.room / SAFETY)), "What a program is told, divided by 1.05."),
        (gb(card.room), "That fills the card to the last byte. An estimate has no scratch buffers "
         "and no fragmentation in it."),
        (gb(80 * GB), "That is the number on the label, read as GB. The cells are GiB."),
        (gb(round(80 * GiB / SAFETY)), "The driver keeps a part: a program never sees all 80 GiB."),
    )  # fmt: skip
    runs = XL, XL.replace(micro_batch=4, accumulation_steps=8), XL.replace(micro_batch=4)
    whole, all_parts, one_part = (estimate(run).total for run in runs)
    smaller = question(
        f"GPT-2 XL under autocast peaks at {_gb(whole)} with 32 sequences at once. And with 8 micro-batches of 4?",
        (_gb(all_parts), "Activations shrink to an eighth; the weights, gradients and moments stay, and the gradients "
         "are now there in forward, too."),
        (_gb(whole // 8), "That divides the states, too, and they do not see the batch."),
        (_gb(whole), "That would be so if all micro-batches were there at once. Each is gone before the next begins."),
        (_gb(one_part), "That is one micro-batch alone. Those before it have left their gradients."),
    )  # fmt: skip
    N = TrainingRun("llama3-8b").model.parameters
    untouched = question(
        "Llama-3 8B, all weights trained with AdamW under autocast on one card. Which peak can no recomputation, no "
        "kernel and no micro-batch bring it below?",
        (_gb(16 * N), "Weights, gradients and two moments in fp32, all there when backward ends."),
        (_gb(2 * N), "Those are weights in 16 bits alone."),
        (_gb(12 * N), "The gradients are missing: when backward ends they are all there."),
        (_gb(18 * N), "Autocast's copies are gone when backward ends. They are no floor."),
    )  # fmt: skip
    b, s, a, h, V = 4, 1024, 12, 768, 50257
    request = question(
        f"A run with b = {b}, s = {s:,}, a = {a}, h = {h} and V = {V:,} fails in forward: “Tried to allocate "
        f"{_mib(4 * b * a * s * s)}”. What is the tensor?",
        ("a score matrix in fp32", "4·b·a·s² bytes: attention is written out."),
        ("the logits", f"s·b·V numbers of two bytes would be {_mib(2 * b * s * V)}."),
        ("the wide tensor of an MLP", f"4·s·b·h numbers of two bytes would be {_mib(8 * b * s * h)}."),
        ("the input of a block", f"s·b·h numbers of four bytes would be {_mib(4 * b * s * h)}."),
    )  # fmt: skip
    capacity, asked = 6 * GiB, 20 * 2**20
    crumbs = question(
        f"On a card of {format_bytes(capacity, 'GiB', 0)} a request for {_mib(asked)} fails, and the message says that "
        "2 % of the card holds no tensor, “which would be enough in one piece”. What do you do?",
        ("make the run smaller", f"2 % are {_mib(capacity // 50)} in crumbs: every full card has such. The next "
         "request would have failed anyway."),
        ("set expandable_segments:True and go on", "That would win 2 % at most. It is the cure where a third of the "
         "card is free."),
        ("call torch.cuda.empty_cache() in each step", "The allocator has given back every empty segment before it "
         "says so."),
        ("take another attention kernel", "Nothing here speaks of scores: the request is small, and the card is full."),
    )  # fmt: skip
    return room, smaller, untouched, request, crumbs
