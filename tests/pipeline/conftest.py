"""Property tests here simulate whole pipelines: some cases take longer than hypothesis' 200 ms, on busy cores much."""

from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
