"""Plug-ins for SGLang. A name is loaded when it is first used: a server loads one of the two, and each needs SGLang."""

from hicache.public_names import on_first_use

__getattr__, __dir__ = on_first_use(__name__, globals())
