"""hicache: GPU memory, pinned CPU memory and disk as one cache for the attention state (KV) of language models.

`__init__.pyi` lists the public names. Each is imported from its module at its first use: importing torch takes a
second, and most programs need neither a store nor every kind of pool.
"""

from hicache.public_names import on_first_use

__version__ = "0.1.0"

__getattr__, __dir__ = on_first_use(__name__, globals())
