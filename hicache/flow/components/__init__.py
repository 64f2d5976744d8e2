"""The components of a cache: each file has one, and all that it adds to the movements."""

from hicache.flow.components.base import CacheComponent
from hicache.flow.components.full import FullAttention
from hicache.flow.components.state import RecurrentState
from hicache.flow.components.window import SlidingWindow

# Of the models that hicache knows, in the order in which the movements call them.
COMPONENTS: tuple[type[CacheComponent], ...] = (FullAttention, SlidingWindow, RecurrentState)
