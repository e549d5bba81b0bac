"""Predict whether a run fits a card, and find a smaller twin that does: from estimates, without torch."""

from bisect import bisect_left

from ..estimating import estimate
from ..estimating.formula_of_compiled import lacking
from ..estimating.sharding import lacking_in_fsdp
from ..gpus import Gpu
from ..models import PRESETS
from ..run import TrainingRun
from ..units import format_bytes

SAFETY = 1.05
"""A run counts as fitting if 1.05 times its estimate does. The reserve is for workspaces, scratch, rounding.

It does not cover the holes between the allocator's blocks, nor CUDA's context. A run that passes can run out
of memory.
"""

NEWEST_CUDNN = (12, 1)  # the newest compute capability that torch's cuDNN attention takes


NOT_REDUCED = ("bf16-master-fp32grad", "fp8")
"""Recipes for which torch has no data parallelism with whole gradients."""


def untrainable(run: TrainingRun) -> str:
    """The reason that nothing here trains `run`, though its bytes can be told; or ""."""
    if run.tensor_parallel > 1:
        return "tensor parallelism is counted, but no time and no measurement is told: set tensor_parallel=1"
    if run.world_size == 1:
        return ""
    if run.zero_stage < 2 and run.precision.name in NOT_REDUCED:
        return (
            f"torch's DistributedDataParallel reduces gradients in the format of the weights, not as"
            f" {run.precision.name} has them: choose precision='bf16-master'"
        )
    if run.zero_stage >= 2:
        return lacking_in_fsdp(run)
    return "" if not run.lora_rank else "LoRA is trained here on one rank: set world_size=1"


def fits(run: TrainingRun, memory: int) -> bool:
    """True if `run` is predicted to fit `memory` bytes with a margin of 5 %."""
    return needed(run) * SAFETY <= memory


def needed(run: TrainingRun) -> int:
    """The estimated peak in bytes; where the closed form does not cover a compiled run, the eager run's.

    A compiled step hardly ever needs more.
    """
    return estimate(run.replace(compile="none") if lacking(run) else run).total


def largest_micro_batch(run: TrainingRun, memory: int) -> int:
    """The largest micro-batch, up to the run's own, that fits `memory` bytes; 0 if none does."""

    def too_large(micro_batch: int) -> bool:
        return not fits(run.replace(micro_batch=micro_batch), memory)

    # Memory grows with the micro-batch: those that are too large follow those that fit. The position of the
    # first of them in the range, which begins at 1, is the size before it.
    return bisect_left(range(1, run.micro_batch + 1), True, key=too_large)


def fit_words(total: int, card: Gpu) -> str:
    """Text that says if `total` bytes fit a GPU, and by how much: "does not fit a V100-32GB by 3.10 GB"."""
    gap = format_bytes(abs(card.room - total), "GB", 2)
    if total > card.room:
        return f"does not fit {named(card)} by {gap}"
    return f"fits {named(card)} with {gap} to spare"


def named(card: Gpu) -> str:
    """A card with its article: "an A100-80GB", "a V100-32GB"."""
    article = "an" if card.name[0] in "AEFHILMNORSX" else "a"  # letters whose names begin with a vowel
    return f"{article} {card.name}"


def lacks(run: TrainingRun, card: Gpu) -> str:
    """A sentence naming what the run needs and an older GPU lacks, or ""."""
    if card.has_bf16:
        return ""
    missing = []
    if "bf16" in run.precision.name:
        missing.append("bf16")
    elif run.precision.tf32:
        missing.append("tf32")
    if run.attention in ("flash", "cudnn"):
        missing.append(f"{run.attention} kernel")
    if not missing:
        return ""
    return f" But this card has no {' and no '.join(missing)}."


def unsupported(run: TrainingRun, capability: tuple[int, int]) -> str:
    """The reason that a GPU of this compute capability cannot run `run`, or "" if it can.

    NVIDIA Ampere (8.0) brought bf16 and tf32. torch's flash and cuDNN kernels need it too, and the latter is
    refused beyond 12.1 (`check_cudnn_hardware_support` in torch's sdp_utils.cpp).
    """
    this = f"this GPU (compute capability {capability[0]}.{capability[1]})"
    if run.attention == "cudnn" and capability > NEWEST_CUDNN:
        return f"{this} is too new for torch's cuDNN kernel: choose attention='flash'"
    if capability >= (8, 0):
        return ""
    older = f"{this} is older than Ampere (8.0)"
    if "bf16" in run.precision.name:
        return f"{older} and does not compute in bf16: choose precision='amp-fp16' or 'fp32'"
    if run.precision.tf32:
        return f"{older} and does not compute in tf32: choose precision='fp32'"
    if run.attention in ("flash", "cudnn"):
        advice = "choose attention='efficient' or 'eager'"
        return f"{older}, and torch has no {run.attention} kernel for it: {advice}"
    return ""


def not_built(capability: tuple[int, int], architectures: list[str]) -> str:
    """A reason why a torch built for `architectures` has no code for a GPU of this capability, or "".

    `architectures` is what `torch.cuda.get_arch_list()` returns; an empty list says nothing. Machine code
    ("sm_86") executes on GPUs of its major version from its minor version on, PTX ("compute_86") on any newer
    one, too (CUDA C++ Programming Guide, compute capabilities).
    """
    if not architectures:
        return ""
    for name in architectures:
        kind, _, digits = name.partition("_")
        built = divmod(int(digits.rstrip("af")), 10)
        if built <= capability and (kind == "compute" or built[0] == capability[0]):
            return ""
    this = f"{capability[0]}.{capability[1]}"
    built_for = ", ".join(architectures)
    why = f"this torch was built for {built_for}, and this GPU has compute capability {this}"
    return f"{why}: install a build of torch that names it"


def twin(run: TrainingRun, card: Gpu) -> TrainingRun:
    """The run itself if `card` can run it, else its nearest twin that the card can: the same step, smaller.

    An older card gets fp16 under autocast and the efficient kernel. The micro-batch shrinks as far as it
    must; only then does a smaller preset of the same family take the model's place. Raises ValueError if not
    even that fits.
    """
    if run.attention == "cudnn" and card.capability > NEWEST_CUDNN:
        run = run.replace(attention="flash")
    if unsupported(run, card.capability):
        kernel = "efficient" if run.attention in ("flash", "cudnn") else run.attention
        run = run.replace(precision="amp-fp16", attention=kernel)
    family = run.model.family
    experts = (0, run.model.experts)  # a run of a model without experts never gets them
    smaller = [model for model in PRESETS.values() if model.family == family and model.experts in experts]
    for model in sorted([run.model, *smaller], key=lambda model: -model.parameters):
        if model.parameters <= run.model.parameters and run.seq_len <= model.max_positions:
            candidate = run.replace(model=model)
            micro_batch = largest_micro_batch(candidate, card.memory)
            if micro_batch:
                return candidate.replace(micro_batch=micro_batch)
    raise ValueError(
        f"no smaller twin of {run} fits {named(card)} of {card.memory:,} bytes: shorten its sequences"
    )
