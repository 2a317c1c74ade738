"""On the path of the processes that tests start: no plots there, for each takes a second."""
raise ImportError('not in these tests')
