"""KV events for routers: which blocks an engine's tiers have, so that routers choose engines by it (docs/events.md)."""

from hicache.kv_events.publisher import EventBatch, EventPublisher, EventSink
from hicache.kv_events.sinks import FileSink, ZmqSink, sink_of

__all__ = ["EventBatch", "EventPublisher", "EventSink", "FileSink", "ZmqSink", "sink_of"]
