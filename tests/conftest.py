from hypothesis import settings

# A busy machine is slow at random; pytest-timeout bounds each test instead.
settings.register_profile("cadenza", deadline=None)
settings.load_profile("cadenza")
