"""KV events report which blocks the tiers of an engine have, so that a router can choose an engine for each request
(docs/events.md)."""

from hicache.kv_events.publisher import EventBatch, EventPublisher, EventSink
from hicache.kv_events.sinks import FileSink, ZmqSink, sink_of

__all__ = ["EventBatch", "EventPublisher", "EventSink", "FileSink", "ZmqSink", "sink_of"]
