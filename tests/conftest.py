"""Shared test set-up: the backend, quiet libraries, one seed a test, and which backend a test can run on."""

import os

# Before any backend is imported: tiny tensors run fastest on one thread, and results do not depend on the cores.
BACKEND = os.environ.setdefault("KERAS_BACKEND", "tensorflow")
for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "agg")
# Tests compile many small programs and run each a few times: compiling, not running, is what takes time.
XLA_FLAGS = ["--xla_backend_optimization_level=0"]
if BACKEND == "jax":
    # Run eagerly, JAX compiles each operation for each shape: this halves that.
    XLA_FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(XLA_FLAGS))

# Where a test runs that needs one backend only: the quickest one, which compiles nothing.
ONCE = "torch"

import hypothesis  # noqa: E402
import pytest  # noqa: E402

# Elsewhere each new shape is compiled, and the examples are the first ones of the same list.
EXAMPLES = 20 if BACKEND == ONCE else 4
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True, max_examples=EXAMPLES, database=None)
hypothesis.settings.load_profile("tests")


def pytest_report_header(config):
    import keras

    return f"keras {keras.__version__} on {keras.backend.backend()}"


def pytest_addoption(parser):
    parser.addoption("--every-backend", action="store_true", help="run what is marked `once` on this backend, too")


def pytest_configure(config):
    config.addinivalue_line("markers", "backends(*names): the test's subject exists on these backends only")
    config.addinivalue_line(
        "markers", f"once(*also): what it shows depends little on the backend; it runs on {ONCE} and those named"
    )


def pytest_collection_modifyitems(config, items):
    for item in items:
        for marker in item.iter_markers("backends"):
            if BACKEND not in marker.args:
                item.add_marker(pytest.mark.skip(reason=f"concerns {', '.join(marker.args)}, not {BACKEND}"))
        once = None if item.get_closest_marker("backends") else item.get_closest_marker("once")
        if once and BACKEND not in (ONCE, *once.args) and not config.getoption("every_backend"):
            item.add_marker(pytest.mark.skip(reason=f"runs on {ONCE}; --every-backend runs it here, too"))


@pytest.fixture(autouse=True)
def seed():
    """Every test starts from the same random state."""
    import keras

    keras.utils.set_random_seed(1337)


@pytest.fixture
def backend():
    """Name of the backend that this process runs on."""
    return BACKEND
