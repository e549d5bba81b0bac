"""Lesson 04, counting parameters: what is there once, what once a block, and what a published number means."""

from functools import partial
from math import prod

from course_utils.interactive.quiz import Question, question
from course_utils.models import PRESETS, block_shapes, mlp_shapes
from course_utils.units import format_bytes, percent

_times, _gb = "{:.1f} times".format, partial(format_bytes, unit="GB", digits=0)


def questions() -> tuple[Question, ...]:
    """The questions in the order of the lesson."""
    model = PRESETS["gpt2-xl"]
    block, mlp = (sum(map(prod, shapes_of(model).values())) for shapes_of in (block_shapes, mlp_shapes))
    one_block = question(
        "What part of the parameters of one GPT-2 block is in its MLP?",
        (percent(mlp / block), "Attention has four matrices of h·h, the MLP two of 4h·h: 8h² of 12h²."),
        (percent(1 - mlp / block), "That is attention's part: queries, keys, values and the output, 4h²."),
        (percent(4 / 8), "That counts one of the MLP's two matrices next to attention's four."),
        (percent(8 / 11), "That leaves out the matrix behind attention."),
    )  # fmt: skip
    model = PRESETS["gpt2"]
    words, N = model.vocab * model.hidden, model.parameters
    doubled, once, missing = (f"{count / 1e6:.0f} million" for count in (N + words, N, N - words))
    tied_head = question(
        "You add up the sizes of everything in the `state_dict()` of the smallest GPT-2, whose head is tied. What do "
        "you get, and how many parameters does it have?",
        (f"{doubled} and {once}", "A state dict lists names. The table of words has two, so it is added twice; in "
         "memory it is there once."),
        (f"{once} and {once}", "That would be so if each tensor had one name."),
        (f"{doubled} and {doubled}", "A tied head has no numbers of its own to train, no gradient and no states."),
        (f"{once} and {missing}", "Tied means that the head has no matrix of its own, not that the model does without "
         "a table of words."),
    )  # fmt: skip
    blocks = 12 * model.layers * model.hidden**2
    twice_as_wide = question(
        "You double the hidden size of the smallest GPT-2 and change nothing else. By what factor does N grow, biases, "
        "norms and positions left aside?",
        (_times((2 * words + 4 * blocks) / (words + blocks)), "The blocks grow four times, the table of words, which "
         "is a third of this model, twice."),
        (_times(4), "That holds for the blocks. Something else here grows more slowly."),
        (_times(2), "That holds for the table of words. A matrix from h to h grows on both sides."),
        (_times(8), "That would be so if depth grew with the width. It stays the same here."),
    )  # fmt: skip
    model = PRESETS["llama3-8b"]
    shrunk = 1 - model.kv / model.hidden
    grouped_queries = question(
        f"Llama 3 with 8 billion parameters has {model.heads} heads of queries and {model.kv_heads} of keys and "
        "values. By what part are the matrices of its attention smaller than with as many heads of keys as of queries?",
        (percent(shrunk * 2 / 4), "Two of the four matrices shrink, to a quarter each."),
        (percent(shrunk), "That holds for the matrices of keys and values alone."),
        (percent(shrunk / 4), "That shrinks one matrix. Keys and values are both grouped."),
        (percent(shrunk * 3 / 4), "That shrinks the queries, too. There are as many of them as before."),
    )  # fmt: skip
    model, dense = PRESETS["mixtral-8x7b"], PRESETS["mistral-7b"]
    states_of_experts = question(
        "Mixtral-8x7B has eight experts, of which a token visits two. How much do weights, gradients and Adam's states "
        "take, at 16 bytes a parameter?",
        (_gb(16 * model.parameters), "Every expert is stored with its gradient and its states, and the rest of the "
         "model is there once."),
        (_gb(16 * model.active_parameters), "Those are the parameters that one token uses. Another token uses others, "
         "and all of them are trained."),
        (_gb(16 * 8 * dense.parameters), "That is eight whole models. Experts share everything but their MLPs."),
        (_gb(2 * model.parameters), "Those are the weights alone, in 16 bits."),
    )  # fmt: skip
    return one_block, tied_head, twice_as_wide, grouped_queries, states_of_experts
