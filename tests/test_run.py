"""What can be chosen for a training run, and what is refused, in words."""

import copy
import dataclasses
import re
from html import escape
from typing import Any

import pytest

from course_utils.gpus import GPUS, gpu
from course_utils.models import PRESETS, TransformerConfig
from course_utils.run import OPTIMIZERS, PRECISIONS, TrainingRun

RUN = TrainingRun("gpt2-xl", micro_batch=32)


def test_defaults_are_filled_in():
    spelled_out = TrainingRun("gpt2-xl", 32, 1024, "amp-bf16", "adamw", "flash", "none", 1, 1)
    assert spelled_out == RUN
    assert RUN.model is PRESETS["gpt2-xl"]
    assert RUN.precision is PRECISIONS["amp-bf16"] and RUN.optimizer is OPTIMIZERS["adamw"]


def test_equal_runs_are_one_key():
    again = TrainingRun(PRESETS["gpt2-xl"], micro_batch=32, precision=PRECISIONS["amp-bf16"])
    assert again == RUN and hash(again) == hash(RUN) and len({again, RUN}) == 1
    assert TrainingRun("gpt2-xl", micro_batch=31) != RUN


def test_replace_changes_a_copy():
    changed = RUN.replace(micro_batch=4, model="gpt2", precision="fp32", attention="eager")
    assert changed == TrainingRun("gpt2", 4, precision="fp32", attention="eager")
    assert RUN.micro_batch == 32
    with pytest.raises(dataclasses.FrozenInstanceError):
        RUN.micro_batch = 4  # pyrefly: ignore [read-only]
    assert copy.deepcopy(TrainingRun("gpt2")).replace(micro_batch=2) == TrainingRun("gpt2", micro_batch=2)


def test_replace_can_set_the_global_batch():
    assert RUN.replace(micro_batch=4, global_batch=32).accumulation_steps == 8
    assert RUN.replace(accumulation_steps=4).replace(global_batch=64).accumulation_steps == 2
    assert RUN.replace(accumulation_steps=4).replace(global_batch=None).accumulation_steps == 4


def test_global_batch_counts_every_rank_and_micro_batch():
    run = TrainingRun("gpt2", micro_batch=4, seq_len=512, accumulation_steps=3, world_size=2)
    assert run.global_batch == 24
    assert TrainingRun("gpt2", micro_batch=4, seq_len=512, global_batch=24, world_size=2) == run


@pytest.mark.parametrize(
    "run",
    [
        TrainingRun("gpt2"),
        RUN,
        TrainingRun("llama3-8b", 2, 4096, "bf16-master", "adamw-fused", "efficient", "full", 4),
        TrainingRun("tiny-gpt", 2, 128, "fp32", "momentum", "eager", world_size=2),
        TrainingRun(dataclasses.replace(PRESETS["gpt2"], layers=3), 1, 64),
    ],
    ids=str,
)
def test_code_makes_an_equal_run(run):
    assert eval(run.code(), {"TrainingRun": TrainingRun, "TransformerConfig": TransformerConfig}) == run


def test_words_for_a_run_say_what_is_unusual():
    assert str(RUN) == "gpt2-xl · b=32 · s=1,024 · amp-bf16 · adamw · flash attention"
    more = RUN.replace(recompute="full", accumulation_steps=2, world_size=3)
    assert str(more).endswith("full recomputation · 2 micro-batches · 3 ranks")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"accumulation_steps": 2}, "2 micro-batches"),
        ({"world_size": 4, "zero_stage": 1}, "4 ranks · ZeRO-1"),
        ({"tensor_parallel": 5}, "tensor parallel 5"),
        (
            {"tensor_parallel": 5, "sequence_parallel": True, "seq_len": 1020},
            "tensor parallel 5 · sequence parallel",
        ),
        ({"world_size": 2, "bucket_view": True}, "2 ranks · gradients as bucket views"),
        ({"clip_grad_norm": 1.0}, "gradients clipped at 1"),
        ({"set_to_none": False}, "gradients zeroed, not freed"),
        ({"loss_chunks": 2}, "loss in 2 chunks"),
        ({"lora_rank": 4}, "LoRA of rank 4 on qkv, out"),
        (
            {"lora_rank": 4, "lora_targets": ("down", "up"), "frozen_bits": 4},
            "LoRA of rank 4 on up, down · frozen in 4 bits",
        ),
        ({"card": "t4-16gb"}, "on T4-16GB"),
        ({"recompute": "offload"}, "activations offloaded"),
        ({"recompute": "every-48"}, "every-48 recomputation"),
        ({"logits": "fp32"}, "logits in fp32"),
        ({"unfused": True}, "unfused GELU and RMSNorm"),
    ],
    ids=str,
)
def test_words_name_each_choice(changes, words):
    run = RUN.replace(**changes)
    assert str(run) == f"{RUN.replace(seq_len=run.seq_len)} · {words}"


def test_code_names_only_what_differs_from_the_defaults():
    assert TrainingRun("gpt2").code() == "TrainingRun('gpt2', micro_batch=1, seq_len=1024)"
    assert RUN.replace(clip_grad_norm=1.0, dropout=0.5).code() == (
        "TrainingRun('gpt2-xl', micro_batch=32, seq_len=1024, clip_grad_norm=1.0, dropout=0.5)"
    )
    assert (
        TrainingRun("llama3-8b", logits="fp32").code()
        == "TrainingRun('llama3-8b', micro_batch=1, seq_len=1024)"
    )
    assert TrainingRun("llama3-8b", logits="compute").code().endswith("seq_len=1024, logits='compute')")


@pytest.mark.parametrize(
    "size", ["micro_batch", "seq_len", "accumulation_steps", "world_size", "global_batch"]
)
@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0, "must be at least 1"),
        (-4, "must be at least 1"),
        (1.5, "whole number"),
        (4.0, "whole number"),
        ("4", "whole number"),
        (True, "whole number"),
        (10**12, "cannot be meant"),
    ],
)
def test_impossible_sizes_are_refused(size: str, value: Any, said: str):
    with pytest.raises(ValueError, match=f"{size} is .*{said}"):
        TrainingRun("gpt2", **{size: value})


@pytest.mark.parametrize(
    ("choice", "value", "nearest"),
    [
        ("precision", "amp_bf16", "amp-bf16"),
        ("precision", "bf16_master", "bf16-master"),
        ("precision", "FP32", "fp32"),
        ("optimizer", "liom", "lion"),
        ("optimizer", "adamw_fused", "adamw-fused"),
        ("attention", "flash-attention", "flash"),
        ("attention", "Eager", "eager"),
        ("recompute", "fully", "full"),
        ("model", "gpt2xl", "gpt2-xl"),
    ],
)
def test_unknown_choices_name_the_nearest_and_all_known(choice, value, nearest):
    choices: dict[str, Any] = {"model": "gpt2"} | {choice: value}
    with pytest.raises(
        ValueError, match=f"unknown {choice} '{value}': did you mean '{nearest}'.*Known: .*{nearest}"
    ):
        TrainingRun(**choices)


@pytest.mark.parametrize("choice", ["precision", "optimizer", "attention", "recompute"])
@pytest.mark.parametrize("value", [3, ("x", "y"), "qqqq"])
def test_what_resembles_nothing_gets_the_list_alone(choice, value):
    with pytest.raises(ValueError, match=rf"unknown {choice} .*\. Known: "):
        TrainingRun("gpt2", **{choice: value})


@pytest.mark.parametrize("name", GPUS)
def test_gpus_are_found_in_any_case(name):
    assert gpu(name) is gpu(name.lower()) is GPUS[name]
    assert GPUS[name].memory > 14 * 2**30
    assert GPUS[name].has_bf16 != (name in ("T4-16GB", "V100-16GB", "V100-32GB")), (
        "Ampere and newer have bf16"
    )


@pytest.mark.parametrize(
    ("name", "nearest"), [("A100-80", "A100-80GB"), ("a100", "A100-40GB"), ("rtx 4090", "RTX4090-24GB")]
)
def test_unknown_gpu_names_the_nearest(name, nearest):
    with pytest.raises(
        ValueError, match=f"unknown GPU '{name}': did you mean '{nearest}'.*Known: .*H200-141GB"
    ):
        gpu(name)


@pytest.mark.parametrize(
    ("hidden", "heads", "attention", "said"),
    [
        (768, 1, "flash", "up to 256"),
        (60, 4, "flash", "multiples of 8"),
        (60, 4, "efficient", "multiples of 8"),
    ],
)
def test_heads_that_a_kernel_cannot_take_are_refused(hidden, heads, attention, said):
    model = TransformerConfig("m", "gpt2", 2, hidden, heads, vocab=300, max_positions=128)
    with pytest.raises(ValueError, match=said):
        TrainingRun(model, seq_len=64, attention=attention)
    assert TrainingRun(model, seq_len=64, attention="eager").model == model


def test_a_changed_dropout_is_shown_and_its_own_is_not():
    own = RUN.model.dropout
    assert str(RUN.replace(dropout=0.25)) == f"{RUN} · dropout 0.25" and own != 0.25
    assert str(RUN.replace(dropout=own)) == str(RUN) == str(RUN.replace(logits="compute"))
    assert "dropout" not in str(TrainingRun(dataclasses.replace(RUN.model, layers=3, dropout=0.3)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch": 4}, "unknown choice of a TrainingRun 'batch'"),
        ({"microbatch": 4}, "did you mean 'micro_batch'"),
        ({"seq_len": 1025}, "1,025 tokens is longer than the 1,024 positions of gpt2-xl"),
        (
            {"precision": "fp32"},
            "flash kernel computes in 16 bits only, not in fp32: choose attention='efficient'",
        ),
        ({"micro_batch": 4, "world_size": 2, "global_batch": 10}, r"global batch of 10 .* 4 · 2 = 8"),
        ({"accumulation_steps": 2, "global_batch": 64}, "not both"),
        ({"global_batch": 10**9}, "accumulation_steps is .* cannot be meant"),
        ({"card": [1]}, r"unknown GPU \[1\]\. Known: "),
        ({"lora_rank": 4, "lora_targets": 5}, "lora_targets is 5"),
        ({"lora_targets": "mlp"}, r"or lora_targets=\(\)"),
        ({"zero_stage": 1.0, "world_size": 2}, r"zero_stage is 1\.0"),
        ({"lora_rank": 4, "frozen_bits": 8.0}, r"frozen_bits is 8\.0"),
        ({"zero_stage": 4, "world_size": 2}, "zero_stage is 4"),
        ({"zero_stage": -1, "world_size": 2}, "zero_stage is -1"),
        ({"zero_stage": True, "world_size": 2}, "zero_stage is True"),
        ({"zero_stage": 1}, "set world_size to 2 or more"),
        ({"bucket_view": True}, "it needs world_size above 1"),
        ({"bucket_view": True, "world_size": 2, "zero_stage": 2}, "and zero_stage 0 or 1"),
        ({"set_to_none": 1}, "set_to_none is 1: it is True or False"),
        ({"sequence_parallel": True}, "set tensor_parallel above 1"),
        ({"tensor_parallel": 2}, "does not divide 25 heads"),
        ({"tensor_parallel": 5, "sequence_parallel": True}, "does not divide a sequence of 1024"),
        ({"clip_grad_norm": 0}, "clip_grad_norm is 0"),
        ({"clip_grad_norm": float("inf")}, "clip_grad_norm is inf"),
        ({"clip_grad_norm": 10**400}, "clip_grad_norm is 1000"),
        ({"clip_grad_norm": True}, "clip_grad_norm is True"),
        ({"clip_grad_norm": "1"}, "clip_grad_norm is '1'"),
        ({"loss_chunks": 5, "micro_batch": 2, "seq_len": 2}, "only 4 tokens"),
        ({"lora_rank": -1}, "lora_rank is -1"),
        ({"lora_rank": 1601}, "lora_rank is 1601"),
        ({"lora_rank": True}, "lora_rank is True"),
        ({"lora_rank": 4, "frozen_bits": 5}, "frozen_bits is 5"),
        ({"frozen_bits": 8}, "freeze them with lora_rank above 0"),
        (
            {"lora_rank": 4, "frozen_bits": 8, "precision": "fp32", "attention": "eager"},
            "needs a 16-bit precision",
        ),
        ({"lora_rank": 4, "precision": "fp8"}, "not accounted for in fp8"),
        ({"lora_rank": 4, "model": "mixtral-8x7b"}, "mixture of experts is not covered"),
        ({"lora_rank": 4, "lora_targets": "head"}, "unknown LoRA target 'head'"),
        ({"recompute": "every-49"}, "the model has only 48 blocks"),
        ({"recompute": "every-0"}, "unknown recompute 'every-0'"),
        ({"dropout": 2.0}, "dropout"),
        ({"logits": "fp16"}, "unknown logits 'fp16'"),
        ({"logits": ""}, "unknown logits"),
    ],
    ids=str,
)
def test_what_is_absurd_or_contradicts_another_choice_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        RUN.replace(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        *({"zero_stage": stage, "world_size": 2} for stage in (0, 1, 2, 3)),
        {"bucket_view": True, "world_size": 2, "zero_stage": 1},
        {"loss_chunks": 4, "micro_batch": 2, "seq_len": 2},
        {"lora_rank": 1600},
        *({"lora_rank": 4, "frozen_bits": bits} for bits in (4, 8, 16)),
        {"micro_batch": 1_000_000},
        {"micro_batch": 1, "world_size": 1000, "global_batch": 1_000_000_000},
    ],
    ids=str,
)
def test_what_is_just_possible_is_accepted(changes):
    run = RUN.replace(**changes)
    assert {name: getattr(run, name) for name in changes} == changes


def test_a_run_shows_itself_as_a_card_with_what_is_unusual_in_bold() -> None:
    usual = TrainingRun("gpt2")
    unusual = TrainingRun("gpt2", 4, world_size=8, zero_stage=2, recompute="full")
    shown = usual._repr_html_()
    assert re.findall("<b>(.*?)</b>", shown) == ["gpt2"] and escape(usual.code()) in shown
    for words in (
        "124,439,808 parameters",
        "b=1",
        "s=1,024",
        "global batch 1",
        "1 rank",
        "amp-bf16",
        "adamw",
    ):
        assert words in shown
    assert "flash attention" in shown and "no recomputation" in shown
    shown = unusual._repr_html_()
    assert re.findall("<b>(.*?)</b>", shown) == ["gpt2", "b=4", "full recomputation", "8 ranks", "ZeRO-2"]
    assert "global batch 32" in shown and "no recomputation" not in shown and "1 rank" not in shown
    assert "background" not in shown and re.search(r"var\(--jp-border-color1,", shown)
