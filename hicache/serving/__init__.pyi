"""The public names: type checkers read them here, and `__init__.py` finds here from which module each comes."""

from hicache.serving.request import FinishReason as FinishReason
from hicache.serving.request import Request as Request
from hicache.serving.request import RequestOutput as RequestOutput
from hicache.serving.runner import Chunk as Chunk
from hicache.serving.runner import ModelRunner as ModelRunner
from hicache.serving.sampling import SamplingParams as SamplingParams
from hicache.serving.scheduler import Scheduler as Scheduler
from hicache.serving.support import check_supported as check_supported
