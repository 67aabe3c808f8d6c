"""The table of GPUs: what it says and that it says it in 80 columns and in safe HTML."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from snapshots import snapshot_in

from gpumagic.display.table import width
from gpumagic.errors import Problem
from gpumagic.gputable import OWNERS
from gpumagic.gputable.gpu_table import GpuTable, label, text_bar
from gpumagic.telemetry.snapshot import GpuSample, Host, ProcessSample, Snapshot

GIB = 2**30
SAMPLE = Path(__file__).parents[1] / "data" / "snapshot.json"


def gpu(number: int = 0, **facts: object) -> GpuSample:
    defaults: dict[str, object] = {
        "name": "NVIDIA H100 80GB HBM3",
        "index": number,
        "ordinal": number,
        "memory_total": 80 * GIB,
        "memory_used": 30 * GIB,
        "memory_reserved": GIB,
    }
    return GpuSample(f"GPU-{number}", **{**defaults, **facts})  # type: ignore[arg-type]


def process(number: int = 0, **facts: object) -> ProcessSample:
    defaults: dict[str, object] = {"pid": 7, "memory": GIB, "name": "python3", "user": "ada"}
    return ProcessSample(f"GPU-{number}", **{**defaults, **facts})  # type: ignore[arg-type]


def snapshot(
    *gpus: GpuSample,
    processes: tuple[ProcessSample, ...] = (),
    problems: tuple[Problem, ...] = (),
) -> Snapshot:
    return Snapshot(1000.0, Host("box"), "580.1", "nvml", gpus, processes, problems)


def line_of(text: str, start: str) -> str:
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    return line


def parts(*counts: int) -> dict[str, int]:
    return dict.fromkeys(OWNERS, 0) | dict(zip(OWNERS, counts, strict=False))


class Words(HTMLParser):
    """The text of HTML, and its elements, which must be closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.said: list[str] = []
        self.elements: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.elements.append(tag)
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.said.append(data)


def test_one_gpu_in_one_line() -> None:
    one = gpu(utilization=73.0, temperature=61, power=412.4, power_limit=700.0)
    line = line_of(str(GpuTable(snapshot(one))), "cuda:0")
    assert line.split("  ")[0] == "cuda:0"
    for words in ("H100 80GB HBM3", "30.0 / 80.0 GiB", "73 %", "61 °C", "412 / 700 W"):
        assert words in line


def test_a_real_machine_is_one_line_each_in_80_columns() -> None:
    cards = [
        gpu(0, name="NVIDIA RTX 6000 Ada Generation", power=312.0, power_limit=300.0),
        gpu(1, name="NVIDIA GeForce RTX 4090", utilization=100.0, temperature=84),
        gpu(2, ordinal=None, index=7, memory_total=180 * GIB, power=1000.0, power_limit=1000.0),
    ]
    own = [process(n, pid=3141592 + n, notebook=f"a-long-name-{n}.ipynb") for n in range(3)]
    shown = str(GpuTable(snapshot(*cards, processes=tuple(own)), processes=True))
    rows, held = shown.split("\n\n")
    assert len(rows.splitlines()) == 2 + len(cards) + 1
    assert line_of(rows, "cuda:0").split()[1:3] == ["RTX", "60…"]
    assert line_of(rows, "not visible").endswith("30.0 / 180.0 GiB    N/A    N/A  1000 / 1000 W")
    for n in range(3):
        assert line_of(held, f"a-long-name-{n}").split()[2] == str(3141592 + n)
    wide = str(GpuTable(snapshot(*cards), width=120))
    assert "RTX 6000 Ada Generation" in wide
    assert "████" not in wide
    assert "░░░░░·········" in line_of(wide, "cuda:0")


def test_what_is_not_known_is_na_and_never_zero() -> None:
    bare = GpuSample("GPU-0", index=0, ordinal=0)
    table = GpuTable(snapshot(bare))
    line = line_of(str(table), "cuda:0")
    assert line.count("N/A") == 4
    assert not any(digit in line.removeprefix("cuda:0") for digit in "0123456789")
    assert Words(table._repr_html_()).said.count("N/A") == 4


def test_the_drivers_number_only_where_it_differs() -> None:
    same = GpuTable(snapshot(gpu(0), gpu(1)))
    other = GpuTable(snapshot(gpu(0, ordinal=1), gpu(1, ordinal=0), gpu(2, ordinal=2)))
    assert "GPU" not in Words(same._repr_html_()).said
    assert "GPU" in Words(other._repr_html_()).said
    assert line_of(str(same), "cuda:1").split()[1] == "H100"
    assert line_of(str(other), "cuda:1").split()[1] == "0"
    assert line_of(str(other), "cuda:2").split()[1] == "H100"


def test_a_hidden_gpu_is_shown_as_such() -> None:
    table = GpuTable(snapshot(gpu(0, ordinal=None), gpu(1, ordinal=0)))
    assert line_of(str(table), "not visible").split()[2] == "0"
    assert "not visible" in Words(table._repr_html_()).said


def test_a_bar_shows_whatever_there_is() -> None:
    assert text_bar(parts(4, 2, 2, 1, 2), 14) == "████▓▓▒▒×░░···"
    assert text_bar(parts(), 14) == "·" * 14
    assert text_bar(parts(2, 2), 100).count("█") == 1
    assert text_bar(parts(2, 2), 100).count("▓") == 1
    assert text_bar(parts(50, 49, 2), 100)[-1] in "▓▒"
    assert text_bar(None, 100).strip() == ""
    assert text_bar(parts(), 0).strip() == ""


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**50), min_size=5, max_size=5), st.integers(1, 2**50))
def test_a_bar_is_always_as_wide_as_a_bar(each: list[int], total: int) -> None:
    assert len(text_bar(parts(*each), total)) == 14


def test_who_holds_an_unknown_amount_explains_what_is_left() -> None:
    table = GpuTable(snapshot(gpu(), processes=(process(memory=None),)))
    assert [holder.memory for holder in table.holders] == [{"GPU-0": None}]
    assert "cuda:0 N/A" in str(table)


def test_a_mig_gpu_and_its_parts() -> None:
    parent = gpu(0, ordinal=None)
    name = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    part = GpuSample("MIG-1", name, 0, 0, mig="GPU-0", memory_total=10 * GIB, memory_used=GIB)
    table = GpuTable(snapshot(parent, part))
    assert line_of(str(table), "MIG mode").split()[2] == "0"
    assert "└ MIG 1g.10gb" in line_of(str(table), "cuda:0")
    # Told once: the part's memory is not also the system's in its parent.
    assert [holder.memory for holder in table.holders] == [{"MIG-1": GIB}]


def test_the_bar_of_a_mig_gpu_shows_who_holds_its_parts() -> None:
    parent = gpu(0, ordinal=None, memory_used=8 * GIB)
    part = GpuSample("MIG-1", "H100 MIG 1g", 0, 0, mig="GPU-0", memory_total=GIB, memory_used=GIB)
    mine = ProcessSample("MIG-1", 1, 8 * GIB, mine=True)
    whole, _ = GpuTable(snapshot(parent, part, processes=(mine,))).splits
    assert whole is not None
    assert (whole["mine"], whole["system"]) == (8 * GIB, parent.memory_reserved)


def test_a_gpu_without_a_number_or_a_device_is_called_by_its_name() -> None:
    assert label(GpuSample("X-1", "Accelerator 9")) == "Accelerator 9"


def test_the_word_virtual_stands_wherever_virtual_gpus_are_shown() -> None:
    own = gpu(0, name="Toy", index=None, virtual=True)
    table = GpuTable(snapshot(own, processes=(process(0, mine=True),)))
    for line in repr(table).splitlines():
        if "Toy" in line or line.startswith("this process"):
            assert "virtual" in line
    assert table._repr_html_().count(">virtual<") == 1
    assert "power" not in repr(table)


def test_another_kernels_virtual_gpus_are_one_line_of_its_own() -> None:
    own = gpu(0, name="Toy", index=None, virtual=True)
    others = [gpu(n, index=None, ordinal=None, virtual=True) for n in range(1, 9)]
    held = [process(n, notebook="explore.ipynb") for n in range(1, 9)]
    table = GpuTable(snapshot(own, *others, processes=(process(0, mine=True), *held)))
    assert repr(table).startswith("box · driver 580.1 · 1 virtual GPU\n")
    assert line_of(repr(table), "explore.ipynb").split("  ")[-1] == "its 8 virtual GPUs 8.0 GiB"
    assert len([line for line in repr(table).splitlines() if line.startswith("cuda:")]) == 1
    away = GpuTable(snapshot(*others[:1], processes=tuple(held[:1])))
    programs = GpuTable(snapshot(*others, processes=(process(1), process(2, pid=8))))
    assert "python3, 2 processes  their 2 virtual GPUs 2.0 GiB" in repr(programs)
    assert "explore.ipynb  its 1 virtual GPU 1.0 GiB" in repr(away)
    assert "No GPU here" in repr(away)
    assert "No GPU here" in "".join(Words(away._repr_html_()).said)


def test_a_holder_of_many_gpus_is_a_sum() -> None:
    many = GpuTable(
        snapshot(*(gpu(n) for n in range(64)), processes=tuple(process(n) for n in range(64)))
    )
    assert line_of(repr(many), "python3, pid 7").split("  ")[-1] == "64 GPUs 64.0 GiB"
    assert line_of(repr(many), "system").split("  ")[-1].strip() == "64 GPUs 1.8 TiB"


def test_a_legend_of_all_owners_fits() -> None:
    each = (
        process(mine=True),
        process(pid=8, kernel="k"),
        process(pid=9),
        process(pid=10, orphan=True),
    )
    *_, legend = repr(GpuTable(snapshot(gpu(), processes=each))).split("\n\n")[0].splitlines()
    assert len(legend) <= 80
    assert legend.endswith("▒ everyone else  × orphaned  ░ system")


def test_a_bar_says_whose_memory_it_is_and_names_only_those_there_are() -> None:
    book = process(pid=8, memory=20 * GIB, notebook="explore.ipynb", kernel="k")
    table = GpuTable(snapshot(gpu(), processes=(process(memory=10 * GIB, mine=True), book)))
    assert "█ this notebook  ▓ my other notebooks  ░ system" in repr(table)
    marks = Words(table._repr_html_()).said
    assert [name for name in marks if name in ("my other notebooks", "everyone else")] == [
        "my other notebooks"
    ]


def test_one_owner_needs_no_legend() -> None:
    one = gpu(memory_used=GIB, memory_reserved=None)
    table = GpuTable(snapshot(one, processes=(process(mine=True),)))
    assert "█" in repr(table)
    assert "this notebook" not in repr(table)


def test_no_gpu_is_one_line_and_an_offer() -> None:
    problem = Problem("no-gpu", "there is none", "%gpus --virtual 2 makes two")
    table = GpuTable(snapshot(problems=(problem,)))
    assert str(table) == "No GPU: there is none; %gpus --virtual 2 makes two."
    said = Words(table._repr_html_()).said
    assert said == ["No GPU: there is none; %gpus --virtual 2 makes two."]


def test_a_problem_beside_gpus_is_cause_and_cure() -> None:
    table = GpuTable(snapshot(gpu(), problems=(Problem("x", "it is lost", "see dmesg"),)))
    assert str(table).endswith("\n\nIt is lost; see dmesg.")


def test_a_gpu_that_is_slowed_says_why_but_not_for_its_power_cap() -> None:
    hot = snapshot(gpu(throttle=("power cap", "hardware thermal slowdown")))
    assert "cuda:0 is throttled: hardware thermal slowdown." in str(GpuTable(hot))
    assert "throttled" not in str(GpuTable(snapshot(gpu(throttle=("power cap",)))))


def test_an_uncertain_ordinal_is_a_question() -> None:
    text = str(GpuTable(snapshot(gpu(ordinal_certain=False))))
    assert line_of(text, "cuda:0?")
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in text


def test_a_temperature_over_its_limit_stands_out() -> None:
    def html(temperature: int) -> str:
        return GpuTable(snapshot(gpu(temperature=temperature, temperature_limit=87)))._repr_html_()

    assert 'class="gm-bad">91 °C' in html(91)
    assert 'class="gm-bad"' not in html(60)


EVIL = "<script>alert('\"&"
texts = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), max_size=60)
names = st.none() | st.just(EVIL) | texts
sizes = st.none() | st.integers(0, 2**45)
readings = st.none() | st.floats(0, 1e4)
snapshots = st.builds(
    lambda gpus, processes, problems: snapshot(
        *gpus, processes=tuple(processes), problems=tuple(problems)
    ),
    st.lists(
        st.builds(
            gpu,
            st.integers(0, 8),
            name=names,
            index=st.none() | st.integers(0, 99),
            ordinal=st.none() | st.integers(0, 99),
            virtual=st.booleans(),
            mig=st.none() | st.just("GPU-0"),
            unified=st.booleans(),
            memory_total=sizes,
            memory_used=sizes,
            memory_reserved=sizes,
            utilization=readings,
            temperature=readings,
            power=readings,
            power_limit=readings,
            throttle=st.none() | st.lists(texts, max_size=2).map(tuple),
        ),
        max_size=4,
        unique_by=lambda sample: sample.uuid,
    ),
    st.lists(
        st.builds(
            process,
            st.integers(0, 8),
            pid=st.integers(0, 2**31),
            memory=sizes,
            name=names,
            user=names,
            notebook=names,
            started=readings,
            mine=st.booleans(),
        ),
        max_size=4,
    ),
    st.lists(st.builds(Problem, st.just("x"), texts, texts), max_size=2),
)


@settings(deadline=None)
@given(snapshots, st.booleans())
def test_any_snapshot_is_at_most_80_columns_and_safe_html(taken: Snapshot, processes: bool) -> None:
    table = GpuTable(taken, processes=processes)
    assert all(width(line) <= 80 for line in str(table).splitlines())
    assert "script" not in Words(table._repr_html_()).elements


def test_the_sample_that_other_languages_read() -> None:
    taken = snapshot_in(SAMPLE.read_text(encoding="utf-8"))
    text = str(GpuTable(taken, processes=True))
    assert line_of(text, "this notebook (train").split()[4:7] == ["31415", "2", "h"]
    assert line_of(text, "grace").split()[1:3] == ["grace", "5150"]
    assert "has fallen off the bus" in text


def test_a_lost_gpu_keeps_its_line_and_says_so() -> None:
    lost = GpuSample("GPU-1", "NVIDIA H100 80GB HBM3", 1, lost=True)
    problem = Problem("gpu-lost", "GPU 1 has fallen off the bus", "see dmesg", "GPU-1")
    table = GpuTable(snapshot(gpu(), lost, problems=(problem,)))
    line = line_of(str(table), "lost")
    assert line.split() == ["lost", "1", "H100", "80GB", "HBM3", *["N/A"] * 4]
    assert "GPU 1 has fallen off the bus; see dmesg." in str(table)
    words = Words(table._repr_html_())
    assert "lost" in words.said
    assert 'aria-label="unknown"' in table._repr_html_()
