"""The reference scheduler and model runner: transformers models with long contexts, served through the three tiers.

Needs the extra `serve`. No other package imports this one.

    from hicache.serving import Scheduler, ModelRunner, Request

`__init__.pyi` lists the public names. Each is imported from its module when it is first used, for transformers takes
seconds to load, and only the runner needs it.
"""

from hicache.public_names import on_first_use

__getattr__, __dir__ = on_first_use(__name__, globals())
