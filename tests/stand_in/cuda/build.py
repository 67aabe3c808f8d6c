"""Build the stand-in CUDA libraries for the torch of this Python: `python build.py FOLDER`.

Needs gcc, g++ and CUDA's headers (the wheels nvidia-cuda-runtime and nvidia-cuda-crt); no CUDA toolkit and none of
the other NVIDIA wheels: a library that torch links and this folder does not play is generated, each of its functions
refusing. FOLDER gets the libraries; site-packages gets a standin_cuda.pth, which loads them in every process that has
STANDIN_CUDA_DEVICES set.
"""

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
NVML = HERE.parent / "nvml.c"
SITE = Path(sysconfig.get_paths()["purelib"])
TORCH = SITE / "torch"
INCLUDES = [f"-I{HERE}", *(f"-isystem{p}" for p in SITE.glob("nvidia/cu*/include"))]
C = ["gcc", "-O2", "-g", "-Wall", "-Wextra", "-fPIC", "-shared", *INCLUDES]
REFUSED = {
    "libcudnn": 1001,
    "libcublas": 0,
    "libcublasLt": 0,
}  # the status of generated functions; else 1
VERSIONS = {}  # of the symbols that torch asks for, by SONAME; most are the SONAME itself


def run(*command):
    subprocess.run([str(part) for part in command], check=True)


def printed(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def needed():
    """Map the SONAME of each NVIDIA library that torch links to the functions that torch calls."""
    found = {}
    prefixes = {
        "libcudart": "cuda|__cuda", "libcublas": "cublas(?!Lt)", "libcublasLt": "cublasLt", "libcudnn": "cudnn",
        "libcufft": "cufft", "libcufile": "cuFile", "libcupti": "cupti", "libcurand": "curand",
        "libcusolver": "cusolver", "libcusparse": "cusparse(?!Lt)", "libcusparseLt": "cusparseLt",
        "libnccl": "p?nccl", "libnvrtc": "nvrtc", "libnvshmem_host": "nvshmem", "libcuda": "cu[A-Z]",
    }  # fmt: skip
    sonames, names = set(), set()
    for library in TORCH.glob("lib/lib*.so"):
        head = printed("objdump", "-p", library)
        sonames |= set(re.findall(r"NEEDED +(lib\S+)", head))
        for soname, versions in re.findall(r"required from (\S+):\n((?: +0x.*\n)+)", head):
            VERSIONS[soname] = versions.split()[3]
        names |= set(
            re.findall(r"^ +U (\w+)", printed("nm", "-D", "--undefined-only", library), re.M)
        )
    for soname in sonames:
        prefix = prefixes.get(soname.partition(".so")[0])
        if prefix:
            found[soname] = sorted(n for n in names if re.match(prefix, n))
    return found


def library(folder, soname, *sources, more=()):
    """Compile a library with the name, and the version of its symbols, that torch asks for."""
    versions = folder / f"{soname}.map"
    versions.write_text(f"{VERSIONS.get(soname, soname)} {{ global: *; }};\n")
    run(
        *C,
        "-o",
        folder / soname,
        *sources,
        f"-Wl,-soname,{soname}",
        f"-Wl,--version-script={versions}",
        *more,
    )
    versions.unlink()


def with_generated(folder, soname, names, *sources, more=()):
    """Compile a library of `sources` and, for each name that they lack, a function that returns one status."""
    status = REFUSED.get(soname.partition(".so")[0], 1)
    generated = folder / f"{soname}.c"
    generated.write_text("#define WEAK __attribute__((weak))\n" + "".join(
        f'WEAK const char *{n}(void) {{ return "stand-in"; }}\n' if re.search("String|Name|Error$", n)
        else f"WEAK int {n}(void) {{ return {status}; }}\n"
        for n in names
    ))  # fmt: skip
    library(folder, soname, *sources, generated, more=more)
    generated.unlink()


def build(folder):
    folder.mkdir(parents=True, exist_ok=True)
    asked = needed()
    runtime = next(n for n in asked if n.startswith("libcudart."))
    library(folder, runtime, HERE / "cudart.c", HERE / "none.c", more=["-lpthread", "-ldl"])
    linked = [f"-L{folder}", f"-l:{runtime}", "-Wl,-rpath,$ORIGIN"]
    for soname, names in asked.items():
        base = soname.partition(".so")[0]
        if base == "libcuda":
            library(folder, soname, HERE / "driver.c", more=linked)
        elif base in ("libcublas", "libcublasLt"):
            lt = ["-DLT"] if base == "libcublasLt" else []
            with_generated(folder, soname, names, *lt, HERE / "blas.c", more=linked)
        elif soname != runtime:
            with_generated(folder, soname, names)
    run("gcc", "-O2", "-w", "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", NVML, HERE / "nvml_more.c",
        "-lpthread", "-Wl,-soname,libnvidia-ml.so.1")  # fmt: skip
    run(
        "g++", "-O1", "-std=c++20", "-fPIC", "-shared", "-Wall", "-Wno-sign-compare",
        "-o", folder / "libstandin_kernels.so", HERE / "kernels.cpp", *INCLUDES, f"-isystem{TORCH}/include",
        f"-isystem{TORCH}/include/torch/csrc/api/include", f"-L{TORCH}/lib",
        "-lc10", "-lc10_cuda", "-ltorch_cpu", "-ltorch_cuda", *linked, f"-Wl,-rpath-link,{folder}",
    )  # fmt: skip


def install(folder):
    """Load the libraries at the start of each Python, and the kernels at the end of torch's import."""
    here = f"sys.path.insert(0, {str(HERE)!r})"
    (SITE / "standin_cuda.pth").write_text(
        f"import os, sys; os.environ.get('STANDIN_CUDA_DEVICES') and "
        f"(os.environ.setdefault('STANDIN_CUDA_LIBRARIES', {str(folder)!r}), {here}, __import__('standin_cuda'))\n"
    )
    info = SITE / "standin_cuda-0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: standin-cuda\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[torch.backends]\nstandin_cuda = standin_cuda_entry:install\n"
    )
    (SITE / "standin_cuda_entry.py").write_text(
        "import sys\n\n\ndef install():\n"
        "    if 'standin_cuda' in sys.modules:\n        sys.modules['standin_cuda'].install()\n"
    )


if __name__ == "__main__":
    to = Path(sys.argv[1]).resolve()
    build(to)
    install(to)
    print(to)
