"""The reference scheduler and model runner: they serve transformers models with long contexts through the three tiers.

Needs the extra `serve`. Only packages of commands import this one.

    from hicache.serving import Scheduler, ModelRunner, Request

`__init__.pyi` lists the public names. Each is imported from its module at its first use: importing transformers takes
seconds, and only the runner needs it.
"""

from hicache.public_names import on_first_use

__getattr__, __dir__ = on_first_use(__name__, globals())
