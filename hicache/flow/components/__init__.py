"""The components of a cache: full attention, windows and states. Each file has one component and its steps in each
transfer."""

from hicache.flow.components.base import CacheComponent
from hicache.flow.components.full import FullAttention
from hicache.flow.components.state import RecurrentState
from hicache.flow.components.window import SlidingWindow

# All components, in the order in which the transfers call them.
COMPONENTS: tuple[type[CacheComponent], ...] = (FullAttention, SlidingWindow, RecurrentState)
