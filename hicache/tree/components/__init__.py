"""What a prefix needs to have to be used: one file a component."""

from hicache.tree.components.base import TreeComponent, last_end
from hicache.tree.components.full import FullComponent
from hicache.tree.components.mamba import MambaComponent
from hicache.tree.components.swa import SwaComponent

__all__ = ["FullComponent", "MambaComponent", "SwaComponent", "TreeComponent", "last_end"]
