"""Lesson 02, Adam: its two states, its first step, its relatives, and what the step itself needs."""

from math import sqrt

from course_utils import TrainingRun, moments
from course_utils.estimating.exact.update import optimizer_step
from course_utils.estimating.published import zero_state_bytes
from course_utils.estimating.states import gradient_bytes, optimizer_state_bytes, parameter_bytes
from course_utils.interactive.quiz import Question, gb, question

MODEL, _bytes, _eta = "gpt2-medium", "{} bytes".format, "{:.3g}·η".format


def questions() -> tuple[Question, ...]:
    """The questions in the order of the lesson."""
    run = TrainingRun(MODEL, precision="fp32", optimizer="adamw", attention="efficient")
    states, weights, gradients = optimizer_state_bytes(run), parameter_bytes(run), gradient_bytes(run)
    two_states = question(  # Kingma and Ba 2015, algorithm 1
        f"GPT-2 medium has {run.model.parameters:,} parameters. You train it in plain fp32 with Adam. How much memory "
        "is Adam's own, from one step to the next?",
        (gb(states), "Two fp32 numbers a parameter: the running mean of the gradient, and that of its square."),
        (gb(states // 2), "That is one number a parameter, as momentum keeps it. Adam divides by a second one."),
        (gb(states + weights + gradients), "That is the whole bill: weights, gradients and states. Only the last of "
         "them are Adam's."),
        ("nothing", "That is true of plain gradient descent. Adam remembers past gradients, and what is freed cannot "
         "be remembered."),
    )  # fmt: skip
    beta1, beta2 = 0.9, 0.999
    mean, square = 1 - beta1, 1 - beta2  # after one step from zero, in units of g and of g²
    first_update = question(  # too long, not too short (Kingma and Ba 2015, section 3)
        f"Adam with β1 = {beta1}, β2 = {beta2} and learning rate η, but without bias correction. Both states start at "
        "zero. How long is the very first update of a weight, whatever its gradient (ε is negligible)?",
        (_eta(mean / sqrt(square)), "m is (1 − β1)·g and v is (1 − β2)·g². Both are too small, but the root of v is "
         "much more so, and the update is too long. Bias correction makes it η."),
        ("η", "That is what bias correction achieves. Left out, m and v are still close to the zero from which "
         "they started."),
        (_eta(mean), "That is m's start alone. The root of v, by which it is divided, is too small as well."),
        (_eta(sqrt(square) / mean), "Turned round: m is divided by the root of v, not the reverse."),
    )  # fmt: skip
    half_of_adam = question(
        "You want optimizer states half as large as Adam's, for fp32 weights. Which optimizer comes closest to half?",
        ("Lion", "It keeps a momentum and takes only the sign of it: one number a parameter."),
        ("SGD without momentum", "It keeps nothing at all from step to step."),
        ("Adafactor", "It keeps a row and a column for a whole matrix: next to nothing."),
        ("8-bit Adam", "It keeps both of Adam's numbers, each in one byte and not in four."),
    )
    run, loop = run.replace(optimizer="adamw-foreach"), run.replace(optimizer="adamw-loop")
    made, one_by_one = (optimizer_step(each)["temporaries"] for each in (run, loop))
    foreach = question(
        f"GPT-2 medium again, {run.model.parameters:,} parameters in fp32. torch's AdamW with `foreach=True` updates "
        "all tensors together. How much memory does its step need for a moment, on top of weights, gradients and "
        "states?",
        (gb(made), "One more number a parameter: Adam's denominator, of all tensors at once, 4 bytes each."),
        (gb(one_by_one), "That is the for-loop, which has the denominator of one tensor at a time: twice the largest "
         "tensor. foreach treats all tensors at once."),
        ("nothing", "That is `fused=True`, where one kernel does it all without writing anything in between."),
        (gb(optimizer_state_bytes(run)), "Those are the states. They are not of the moment, they stay."),
    )  # fmt: skip
    run = TrainingRun(MODEL, precision="bf16-master", optimizer="adamw-foreach")
    N = run.model.parameters
    peak, kept = round(moments(run)["optimizer step"].total / N), round(sum(zero_state_bytes(N).values()) / N)
    upcast_at_once = question(
        "Mixed precision with master weights: 16-bit weights and gradients, and in fp32 master weights and two "
        "moments. Before the step all gradients are upcast to fp32 at once, the 16-bit ones are freed, then AdamW "
        "steps with `foreach=True`. How many bytes a parameter are alive at the fullest moment of the step?",
        (_bytes(peak), "16-bit weights and twelve bytes of the optimizer's stay. The fp32 gradients add 4, and what "
         "foreach makes on the way adds 4 again."),
        (_bytes(kept), "That is the sum at rest, the one that everybody quotes. During this step the gradients take "
         "more than 2 bytes, and the update needs room as well."),
        (_bytes(peak - 4), "You have the gradients in fp32. What does foreach itself make, one for each parameter?"),
        (_bytes(peak + 2), "That still counts the 16-bit gradients, which were freed when their fp32 copies stood."),
    )  # fmt: skip
    return two_states, first_update, half_of_adam, foreach, upcast_at_once
