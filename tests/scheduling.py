"""Give tests to the processes of pytest-xdist: what starts a browser or engines, all to one."""

# What is started once in a process, and takes seconds.
_TOGETHER = ("tests/browser/", "tests/cluster/", "tests/magics/test_kernel", "tests/telemetry/")
# Each test of these takes so long that it is given away by itself.
_APART = ("tests/test_pages.py", "tests/test_examples.py")
# What takes long begins first: what is left for the end is short, and no process waits for another.
_FIRST = (
    "tests/browser/",
    "tests/cluster/",
    *_APART,
    "tests/fitting/",
    "tests/memory/test_out_of_memory.py",
    "tests/dryrun/",
    "tests/memory/",
    "tests/virtual/",
    "tests/magics/",
)


def turn(test):
    """The place of a test in the order of all, by its id."""
    return next((n for n, start in enumerate(_FIRST) if test.startswith(start)), len(_FIRST))


def given_with(test):
    """What the tests that one process runs in a row have in common."""
    if test.startswith(_APART):
        return test
    file = test.partition("::")[0]
    return next((start for start in _TOGETHER if test.startswith(start)), file)


def make_scheduler(config, log):
    """Gives each process the next tests as soon as it has run the last."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return given_with(nodeid)

    config.option.loadscopereorder = False
    return Scheduling(config, log)
