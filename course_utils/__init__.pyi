"""What `course_utils` offers, for type checkers and editors; `_OFFERED` in __init__.py has the same at run
time.
"""

from .allocator.counters import counted as counted
from .allocator.policy import CachingAllocator as CachingAllocator
from .allocator.replay import replay as replay
from .allocator.snapshots import compare_with_gpu as compare_with_gpu
from .allocator.snapshots import read_snapshot as read_snapshot
from .allocator.snapshots import save_snapshot as save_snapshot
from .breakdown import KINDS as KINDS
from .breakdown import MemoryBreakdown as MemoryBreakdown
from .errors import GpuOutOfMemory as GpuOutOfMemory
from .errors import SimulationUnavailable as SimulationUnavailable
from .errors import StepError as StepError
from .estimating import estimate as estimate
from .estimating import moments as moments
from .estimating.megatron import rank_states as rank_states
from .figures.memory_maps import memory_map as memory_map
from .gpus import GPUS as GPUS
from .gpus import gpu as gpu
from .lessons.shared.search import find as find
from .measurement import Measurement as Measurement
from .measuring.compare import compare as compare
from .measuring.compare import difference as difference
from .measuring.files import read_measurement as read_measurement
from .measuring.files import save_measurement as save_measurement
from .measuring.moments import measure_moments as measure_moments
from .measuring.recorded import recordings as recordings
from .measuring.release import expected_out_of_memory as expected_out_of_memory
from .measuring.sources import card_here as card_here
from .measuring.sources import measure as measure
from .measuring.verdict import Verdict as Verdict
from .measuring.verdict import verdict as verdict
from .models import PRESETS as PRESETS
from .models import TransformerConfig as TransformerConfig
from .planning.fit import arrange as arrange
from .planning.fit import fit as fit
from .planning.twin import twin as twin
from .run import TrainingRun as TrainingRun
from .units import format_bytes as format_bytes
from .units import parse_bytes as parse_bytes
from .units import plus_minus as plus_minus
from .watching.on_gpu import on_gpu as on_gpu

__version__: str
__all__: list[str]
