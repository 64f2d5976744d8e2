"""What a prefix has to have to be usable: one file a component."""

from hicache.tree.components.base import Rules, Walk
from hicache.tree.components.full import FullRules
from hicache.tree.components.mamba import MambaRules
from hicache.tree.components.swa import SwaRules

__all__ = ["FullRules", "MambaRules", "Rules", "SwaRules", "Walk"]
