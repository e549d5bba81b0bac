# ---
# jupyter:
#   course:
#     minutes: 60
#     budget_seconds: 90
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 11 · Model and pipeline parallelism
#
# **60 minutes.** You should know what a training step keeps and when ([lesson
# 01](01_where_did_the_memory_go.ipynb)), and what a [micro-batch](../docs/glossary.md#micro-batch-and-global-batch) is.
# No GPU is needed: four processes on your own processor will be the four devices.
#
# When a model is too large for one device, cut it: the first layers here, the next ones there. Such a cut is cheap,
# since nothing but activations crosses it. But then the devices wait for one another. How long? How do you make it
# less? And what does *that* cost in memory?

# %% [markdown]
# ## One stage after the other
# Four devices, each with a quarter of the layers, a [stage](../docs/glossary.md#pipeline-stage). A batch goes forward
# through all four, and backward through all four. Nothing else happens.
#
# **Your guess.** What percentage of the time does each device work?

# %%
from course_utils.interactive.guesses import predict, reveal

predict("11.naive", unit="%")

# %%
from course_utils.lessons.pipelines.figures import pipeline_figure
from course_utils.lessons.pipelines.schedules import simulate

naive = simulate("naive", stages=4, micro_batches=8)
pipeline_figure(naive)

# %%
print(f"formula: 1/p = {1 / naive.stages:.0%}; in the schedule each stage works {1 - naive.idle:.0%} of the time")
reveal("11.naive", 100 * (1 - naive.idle), unit="%")

# %% [markdown]
# No gap: one works, p − 1 wait. Four devices are as slow as one. What they do have is memory for four. The figure's
# lower half says when: the first stage is the first to fill and the last to be emptied.

# %% [markdown]
# ## Cut the batch, too
# [GPipe](https://arxiv.org/abs/1811.06965) cuts the batch into m micro-batches. When the first one leaves the first
# stage, the second one enters. Weights are updated once, when all have come back, so the gradients are those of the
# whole batch. Stages still wait until the first micro-batch has come through, and again at the end: what is left is a
# [bubble](../docs/glossary.md#bubble) at each end.
#
# **Your guess.** How many micro-batches do four stages need to wait at most 10 % of the time?

# %%
predict("11.micro", unit="micro-batches")

# %% [markdown]
# Now drive it:

# %%
from course_utils.lessons.pipelines.widget import pipeline_player

pipeline_player("GPipe", stages=4, micro_batches=8)

# %% [markdown]
# Where is the player's formula from? Count each work on one micro-batch as one column. A stage works in m columns.
# There are m + p − 1 columns in all, because p − 1 pass before the last stage gets its first micro-batch. So
# (p − 1)/(m + p − 1) of the time is lost (Huang et al. 2019, section 2.3).

# %%
from course_utils.lessons.pipelines.schedules import bubble, micro_batches_for
from course_utils.figures import lines

m = [1, 2, 4, 8, 16, 32, 64, 128]
lines(
    {f"{p} stages": (m, [100 * bubble(p, each) for each in m]) for p in (2, 4, 8, 16)},
    "The bubble shrinks with more micro-batches and grows with more stages",
    "micro-batches", "% of the time lost", log_x=True, provenance="formula",
)  # fmt: skip

# %%
for p, each in ((2, 4), (4, 8), (4, 27), (8, 64), (16, 64)):
    gap = bubble(p, each) - simulate("GPipe", p, each).idle
    print(f"p = {p:2d}, m = {each:2d}: formula {bubble(p, each):6.2%}, formula − simulated {abs(gap):.2%}")
enough = micro_batches_for(4, 0.10)
print(f"at most 10 % with 4 stages: m = {enough}. GPipe's own rule, m = 4·p, leaves {bubble(4, 16):.0%}")
reveal("11.micro", enough, unit="micro-batches")

# %% [markdown]
# No gap either, as long as all stages take equally long. If one is slower, all wait for it:

# %%
slow = simulate("GPipe", stages=4, micro_batches=8, slow={1: 1.5})
pipeline_figure(slow, f"One stage takes half as long again: {slow.idle:.0%} idle".replace("%", " %"))

# %% [markdown]
# So cut by time, not by number of layers: the last stage has the head besides its blocks. You will do that in an
# exercise.

# %% [markdown]
# ## Who keeps what
# Time was the easy half. A stage keeps the activations of each micro-batch that it has sent forward and not yet taken
# backward. Under GPipe these are all m. The [1F1B](../docs/glossary.md#1f1b) schedule takes a micro-batch backward as
# soon as it can: after filling the pipeline each stage does one forward, one backward, in turn ([Narayanan et al.
# 2021](https://arxiv.org/abs/2104.04473), section 2.2).
#
# **Your guess.** Four stages, 16 micro-batches, 1F1B. How many micro-batches' activations does the *first* stage keep?

# %%
predict("11.kept", unit="micro-batches")

# %%
one_one = simulate("1F1B", stages=4, micro_batches=16)
pipeline_figure(one_one)

# %%
gpipe = simulate("GPipe", stages=4, micro_batches=16)
print("stage  GPipe keeps  1F1B keeps  p − stage")
for stage in range(4):
    print(f"{stage:5d}  {gpipe.most_kept(stage):11d}  {one_one.most_kept(stage):10d}  {4 - stage:9d}")
print(f"idle: GPipe {gpipe.idle:.1%}, 1F1B {one_one.idle:.1%}")
reveal("11.kept", one_one.most_kept(0), unit="micro-batches")

# %% [markdown]
# The bubble is the same, to the last digit. But a stage keeps no more micro-batches than there are stages from it to
# the end, however many the batch has. So m can grow until the bubble is small. That is why nearly everybody uses 1F1B.
#
# Now in bytes: GPT-2 XL and its 32 sequences, as 8 micro-batches of 4, on four devices.

# %%
from course_utils import TrainingRun, format_bytes
from course_utils.lessons.pipelines.memory import stage_memory
from course_utils.figures import stack

run = TrainingRun("gpt2-xl", micro_batch=4, seq_len=1024, precision="bf16-master")
rows = {
    f"{name}, stage {stage}": stage_memory(run, name, 4, 8, stage)
    for name in ("GPipe", "1F1B")
    for stage in range(4)
}  # fmt: skip
stack(rows, "1F1B halves the first stage's activations and leaves the last an eighth",
      provenance="estimated: states, and what forward keeps")  # fmt: skip

# %%
from course_utils import estimate

alone, at_once = stage_memory(run, "1F1B", 1, 8, 0).total, estimate(run.replace(micro_batch=32)).total
print(f"one device, 8 micro-batches of 4: {format_bytes(alone, 'GB', 1)}, counted as the stages are; at its peak "
      f"{format_bytes(estimate(run.replace(accumulation_steps=8)).total, 'GB', 1)}")  # fmt: skip
print(f"one device, all 32 sequences at once: {format_bytes(at_once, 'GB', 1)} at the peak")
for name in ("GPipe", "1F1B"):
    sizes = [rows[f"{name}, stage {stage}"].total for stage in range(4)]
    print(f"{name:5s} fullest {format_bytes(max(sizes), 'GB', 1)}, emptiest {format_bytes(min(sizes), 'GB', 1)}")
last = stage_memory(run, "GPipe", 4, 8, 3)["activations"] - stage_memory(run, "GPipe", 4, 8, 2)["activations"]
print(f"the last stage's head and loss under GPipe, 8 micro-batches: {format_bytes(last, 'GB', 1)}")

# %% [markdown]
# Compare like with like: one device that cuts its batch in the same way. Against it, 1F1B on four devices halves what
# the fullest one needs, and does not quarter it. The states are shared out. But the first stage keeps p micro-batches
# of a p-th of the layers: as many activations as one device has of one micro-batch. GPipe's fullest stage keeps all m,
# and saves little.
#
# Look at the ends. The first stage has the embedding. The last one has the head (a copy of the embedding where they are
# [tied](../docs/glossary.md#tied-head)) and the loss. The loss's tensors of s·b·V numbers are there for every
# micro-batch that the stage keeps: m of them under GPipe, one under 1F1B.
#
# GPipe's authors knew. Their stages keep only what crosses a boundary, one input per micro-batch, and run the whole
# stage again in backward: [recomputation](../docs/glossary.md#activation-recomputation) was part of GPipe from the
# start (section 2.3). With N samples in M micro-batches and L layers in K partitions, the paper's letters, the peak is
# O(N + L/K · N/M): all boundary inputs, and one stage for one micro-batch. The same function can tell:

# %%
for name, recompute in (("GPipe", "none"), ("GPipe", "every-12"), ("1F1B", "none"), ("1F1B", "every-12")):
    first = stage_memory(run.replace(recompute=recompute), name, 4, 8, 0)["activations"]
    how = "runs its 12 blocks again" if recompute != "none" else "keeps everything"
    print(f"{name:5s} the first stage {how:24s} {format_bytes(first, 'GB', 1):>7s} of activations")

# %% [markdown]
# With recomputation the schedules hardly differ in memory: what is left is one micro-batch of one stage. 1F1B gets far
# without it, and so without one more forward.

# %% [markdown]
# ## No bubble at all?
# PipeDream ([Narayanan et al. 2019](https://doi.org/10.1145/3341301.3359646)) goes one further. Why wait at the end of
# a batch? Let micro-batches follow one another for ever, and let every stage update its weights after each backward.
# Then nobody waits, except once at the very beginning, and at the end where there is one.
#
# But there is a catch. Between a micro-batch's forward and its backward the weights change. A backward with other
# weights than the forward's is the gradient of nothing. So each stage keeps the *version* that a micro-batch has seen
# until it comes back: weight stashing (section 3.3 of the paper).
#
# **Your guess.** How many versions of its weights does the first of four stages keep?

# %%
predict("11.versions", unit="versions")

# %%
pipeline_figure(simulate("PipeDream", stages=4, micro_batches=20))

# %%
endless = simulate("PipeDream", stages=4, micro_batches=200)
print(f"idle in 200 micro-batches: {endless.idle:.1%}")
print("stage  versions  updates late  kept weights")
for stage in range(4):
    memory = stage_memory(run, "PipeDream", 4, 8, stage)
    weights = format_bytes(memory["parameters"] + memory["weight_copies"], "GB", 1)
    print(f"{stage:5d}  {endless.versions(stage):8d}  {endless.late(stage):12d}  {weights:>12s}")
reveal("11.versions", endless.versions(0), unit="versions")

# %% [markdown]
# p − stage versions: as many as micro-batches in flight. Memory is one price. The other is
# [staleness](../docs/glossary.md#staleness): the first stage's gradient is p − 1 updates late when it is applied. What
# does that do? Take the simplest valley, w²/2, and gradients that are d updates late: w ← w − α·w(d updates ago).

# %%
from course_utils.lessons.pipelines.staleness import found_rate, largest_rate, late_descent

print("late  largest rate that settles: by trying, by formula 2·cos(d·π/(2d + 1))")
for late in (0, 1, 3, 7, 15):
    print(f"{late:4d}  {found_rate(late):31.2f}  {largest_rate(late):10.2f}")
steps = list(range(41))
lines(
    {f"{late} late": (steps, late_descent(0.4, late, 40)) for late in (0, 1, 3)},
    "At the same learning rate, one update late does no harm; three swing for long",
    "updates", "w", markers=False, provenance="computed: w ← w − 0.4·w(d updates ago)",
)  # fmt: skip

# %% [markdown]
# The later, the smaller the learning rate has to be. That is one reason why large models are trained by synchronous
# schedules, bubble and all. Their gradients are those of one process. That can be checked; let us do so.

# %% [markdown]
# ## For real
# Four processes, one stage each, and PyTorch's own schedules. Each runs this function:


# %%
def one_rank(micro_batches, seconds):
    import torch.distributed as dist
    from torch.distributed import pipelining

    from course_utils.lessons.pipelines.real_ranks import Clock, batch, gradients, loss, part

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layers, (x, target), found = part(rank, ranks, seconds), batch(), []
    stage = pipelining.PipelineStage(layers, rank, ranks, "cpu")
    clock = Clock(stage)
    for schedule in (pipelining.ScheduleGPipe, pipelining.Schedule1F1B):
        plan = schedule(stage, micro_batches, loss_fn=loss)
        for _ in range(2):  # the first time is a rehearsal: the stages tell each other their shapes
            clock.forget(), layers.zero_grad(), dist.barrier()
            plan.step(*[x] * (rank == 0), target=target if rank == ranks - 1 else None)
        found.append({"gradients": gradients(layers), "noted": clock.noted, "kept": clock.most_kept})
    dist.destroy_process_group()
    return found


# %% [markdown]
# The network is eight small layers, two on each rank, really computed and really sent. But your processor may
# have fewer than four cores. So each stage also pauses, for 50 ms forward and 100 ms backward: that stands for a GPU at
# work, and lets four stages work at once.

# %%
from course_utils.ranks.launch import run_ranks, why_no_ranks
from course_utils.lessons.pipelines.real_ranks import by_schedule, difference, whole_gradients

ranks = [] if why_no_ranks() else run_ranks(one_rank, 4, micro_batches=8, seconds=0.05)
print(why_no_ranks() or f"{len(ranks)} processes have trained one step under each schedule")

# %% [markdown]
# First: is the result the same as one process's, that runs all layers on the whole batch?

# %%
whole = whole_gradients()
for name, found in by_schedule(ranks).items():
    off = difference([row for rank in found for row in rank["gradients"]], whole)
    print(f"{name:5s} gradients equal to rounding, within a millionth of the largest: {off < 1e-6}")

# %% [markdown]
# What differs is rounding in fp32, where sums are formed in another order. Nothing is approximated by a synchronous
# pipeline. Second: do the stages do what the simulator says, and keep what it says?

# %%
for name, found in by_schedule(ranks).items():
    predicted = simulate(name, 4, 8)
    orders = [[f"{kind}{micro}" for kind, micro, *_ in rank["noted"]] for rank in found]
    print(f"{name:5s} every stage in the simulated order: {orders == [predicted.order(s) for s in range(4)]}; "
          f"micro-batches kept {[rank['kept'] for rank in found]}, "
          f"simulated {[predicted.most_kept(s) for s in range(4)]}")  # fmt: skip

# %% [markdown]
# Third, the times. **Your guess.** Four stages, eight micro-batches, 50 ms forward and 100 ms backward each: how many
# milliseconds does the step take if nothing else takes time?

# %%
predict("11.time", unit="ms")

# %%
p, m = 4, 8
print(f"formula: (m + p − 1)·(50 + 100) = {(m + p - 1) * 150} ms; simulated: {simulate('GPipe', p, m).span * 50:g} ms")
reveal("11.time", simulate("GPipe", p, m).span * 50, unit="ms")

# %% [markdown]
# Predicted above, measured below; the measured ones are your own machine's, and vary.

# %% tags=["nbval-ignore-output"]
from course_utils.lessons.pipelines.figures import timelines
from course_utils.lessons.pipelines.real_ranks import in_milliseconds, works

panels = {}
for name in ("GPipe", "1F1B"):
    panels[f"{name}, predicted"] = in_milliseconds(simulate(name, 4, 8).works, 50)
    if ranks:
        panels[f"{name}, measured"] = works([rank["noted"] for rank in by_schedule(ranks)[name]])
timelines(panels, "Four processes keep the predicted schedule, a little late",
          provenance="measured: 4 processes (gloo) on this processor")  # fmt: skip

# %% tags=["nbval-ignore-output"]
from course_utils.lessons.pipelines.real_ranks import measured_span

for name, found in by_schedule(ranks).items():
    took, idle = measured_span([rank["noted"] for rank in found])
    print(f"{name:5s} {1e3 * took:.0f} ms, predicted − measured {50 * simulate(name, p, m).span - 1e3 * took:+.0f} ms; "
          f"idle {idle:.1%}, predicted {simulate(name, p, m).idle:.1%}")  # fmt: skip

# %% [markdown]
# **The gap.** Sending takes time, a process is not always woken on time, and 1F1B has more handovers on its critical
# path: in the steady state neighbors hand something over after every work. On GPUs it is the same in small:
# messages of 2·s·b·h bytes, and stages that are never quite equal.

# %% [markdown]
# ## Which parallelism, when?
# You have met four ways to use many GPUs: [replicas](../docs/glossary.md#replica), [ZeRO](../docs/glossary.md#zero),
# cutting every matrix ([tensor parallelism](../docs/glossary.md#tensor-parallelism)), cutting between layers. What each
# costs depends on the model and the cluster. So compute it: Llama-3 70B, 4,096 tokens, 512 sequences a step, on 8 nodes
# of 8 H100s. Within a node GPUs talk over NVLink, between nodes over a network of 50 GB/s for each GPU (400 Gb/s).
#
# **Your guess.** Take the time for the arithmetic alone, at the GPUs' peak rate. A step takes longer: stages wait, and
# messages and arithmetic take turns. By how many percent is a step of the best plan that fits longer?

# %%
predict("11.plan", unit="%")

# %%
from course_utils import gpu
from course_utils.lessons.pipelines.plans import Cluster, Plan, account, cheapest

llama = TrainingRun("llama3-70b", micro_batch=1, seq_len=4096, precision="bf16-master", recompute="full")
cluster = Cluster(gpu("H100-80GB"), nodes=8, per_node=8, network=50e9)
wanted = {
    "replicas": lambda plan: plan.tensor == plan.pipeline == 1 and plan.stage == 0,
    "ZeRO-1 alone": lambda plan: plan.tensor == plan.pipeline == 1 and plan.stage == 1,
    "ZeRO-3 alone": lambda plan: plan.tensor == plan.pipeline == 1 and plan.stage == 3,
    "tensor and data": lambda plan: plan.tensor > 1 and plan.pipeline == 1 and plan.stage < 3,
    "tensor and pipeline": lambda plan: plan.tensor > 1 and plan.pipeline > 1 and plan.stage == 0,
    "pipeline and data": lambda plan: plan.tensor == 1 and plan.pipeline > 1,
}
best = {name: cheapest(llama, cluster, 512, allowed) for name, allowed in wanted.items()}

# %%
print(f"{'':20s} {'best that fits':38s} {'GB':>5s} {'idle':>5s} {'messages':>9s} {'in turn':>8s} {'hidden':>7s}")
for name, found in best.items():
    if found is None:
        plan = Plan(64, stage=1 if "ZeRO" in name else 0)
        smallest = format_bytes(account(llama, cluster, plan, 512).memory, "GB", 0)
        print(f"{name:20s} none: {smallest} per GPU")
    else:
        words = f"{found.plan}, b = {found.micro_batch}"
        print(f"{name:20s} {words:38s} {found.memory / 1e9:5.1f} {found.idle:5.0%} "
              f"{found.messages:8.1f}s {found.total:7.1f}s {found.overlapped:6.1f}s")  # fmt: skip
print(f"what each GPU has: {cluster.gpu.room / 1e9:.1f} GB")

# %%
in_turn = cheapest(llama, cluster, 512, lambda plan: True)
hidden = cheapest(llama, cluster, 512, lambda plan: True, overlapped=True)
print(f"first when nothing hides:           {in_turn.plan}, b = {in_turn.micro_batch}")
print(f"first when all hides that can hide: {hidden.plan}, b = {hidden.micro_batch}")
reveal("11.plan", 100 * (in_turn.total / in_turn.seconds["compute"] - 1), unit="%")

# %% [markdown]
# Two columns, two rankings. *In turn* adds up arithmetic, bubble and messages. *Hidden* lets messages travel during
# the arithmetic, as real frameworks do, and counts only what is left of them. ZeRO-3 goes from last to first: it sends
# most, but all of it can hide. While one block computes, the next one is gathered and the gradients of the one before
# are reduced. Tensor parallelism's messages cannot hide: the next product needs the sum that they bring. Nor can a
# bubble, as a waiting stage has nothing to compute.
#
# Neither column is a forecast. *Hidden* is the best case: a replica's gradients, for example, have only the last
# micro-batch's backward to hide behind. And messages are counted in 16 bits; gradients that are summed in fp32 take
# twice as long.
#
# | | cuts | sends | can it hide? | choose it when |
# |---|---|---|---|---|
# | replicas | nothing | gradients, once per step | behind the last backward | everything fits on one GPU |
# | ZeRO-2 | states, gradients | gradients, once per micro-batch | yes | weights fit on one GPU |
# | ZeRO-3, FSDP | all states | weights twice and gradients once, per micro-batch | yes | micro-batches are large |
# | tensor | each matrix, activations | activations, 4 times per block, 6 if recomputed | no | within a node |
# | pipeline | layers | activations, once per cut | yes, but not the bubble | links are slow; m ≫ p |
#
# How far from the data sheet's rates is a real training? [Meta's model
# card](https://github.com/meta-llama/llama-models/blob/main/models/llama3_1/MODEL_CARD.md) says that Llama 3.1 70B saw
# about 15 trillion tokens in 7.0 million H100 hours. MFU, model [FLOPs](../docs/glossary.md#flops) utilization, is 6·N
# per token over what the GPUs could have computed in that time ([Chowdhery et al.
# 2022](https://arxiv.org/abs/2204.02311), section 4.1; attention's own products are left out here).

# %%
tokens, gpu_seconds = 15e12, 7.0e6 * 3600
mfu = 6 * llama.model.parameters * tokens / (gpu_seconds * cluster.gpu.rates.tensor)
theirs = gpu_seconds / tokens * 512 * 4096 / cluster.gpus
print(f"MFU {mfu:.0%}; a step like ours on 64 such GPUs takes {theirs:.0f} s, whatever their plan was")

# %% [markdown]
# That is longer than any plan in the table. No kernel reaches the peak rate, sequences grew longer late in that
# training, and the hours include failures and restarts. Use the table's seconds to rank plans, not to promise a date.
#
# Change the cluster and see what wins: a slow network, older cards, larger ones, fewer of them.

# %%
for name, other in {
    "the same, 5 GB/s network": Cluster(gpu("H100-80GB"), 8, 8, 5e9),
    "A100-80GB": Cluster(gpu("A100-80GB"), 8, 8, 25e9),
    "H200, half the nodes": Cluster(gpu("H200-141GB"), 4, 8, 50e9),
    "four nodes of 4 H100": Cluster(gpu("H100-80GB"), 4, 4, 50e9),
}.items():
    for column, hide in (("in turn", False), ("hidden", True)):
        found = cheapest(llama, other, 512, lambda plan: True, overlapped=hide)
        print(f"{name:26s} {column:8s} {f'{found.plan}, b = {found.micro_batch}' if found else 'nothing fits'}")

# %% [markdown]
# ## Five questions
# The next cell asks what you have understood. Each choice answers at once, and tells you why it is right or which
# mistake leads to it.

# %%
from course_utils.lessons import quiz

quiz(11)

# %% [markdown]
# ## Take home
# **Remember** Cutting between layers costs waiting, (p − 1)/(m + p − 1) of the time; more micro-batches make it
# less, and under 1F1B they take no more memory.
#
# **Breaks when** stages are unequal, when there are few micro-batches, or when gradients are late: then it trains
# something else.
#
# **Cheat-sheet line** bubble (p − 1)/(m + p − 1) · kept micro-batches: GPipe m, 1F1B p − stage · PipeDream: p − stage
# weight versions, p − 1 − stage updates late · sends 2·s·b·h bytes a cut and direction.
#
# Now solve the [exercises of this lesson](../exercises/11_model_and_pipeline_parallelism.ipynb).
