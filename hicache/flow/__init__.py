"""The movements of pages: one file each, all started and landed by the engine."""
