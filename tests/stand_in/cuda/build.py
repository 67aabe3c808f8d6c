"""Build the stand-in CUDA libraries for the torch of this Python: `python build.py FOLDER`.

Needs gcc, g++ and CUDA's headers (the wheels nvidia-cuda-runtime and nvidia-cuda-crt), no CUDA
toolkit and none of NVIDIA's other wheels: of a library that torch links, the functions that no
source here has are generated. They refuse, and the log names them. FOLDER gets the libraries;
site-packages gets a standin_cuda.pth, which loads them in every process: there are GPUs where
STANDIN_CUDA_DEVICES is set, else none.
"""

import re
import subprocess
import sys
import sysconfig
from importlib.metadata import requires
from pathlib import Path

HERE = Path(__file__).resolve().parent
NVML = HERE.parent / "nvml.c"
SITE = Path(sysconfig.get_paths()["purelib"])
TORCH = SITE / "torch"
INCLUDES = [f"-I{HERE}", *(f"-isystem{p}" for p in SITE.glob("nvidia/cu*/include"))]
C = ["gcc", "-O2", "-g", "-Wall", "-fPIC", "-shared", *INCLUDES]
PREFIXES = {
    "libcudart": "cuda|__cuda", "libcublas": "cublas(?!Lt)", "libcublasLt": "cublasLt",
    "libcudnn": "cudnn", "libcufft": "cufft", "libcufile": "cuFile", "libcupti": "cupti",
    "libcurand": "curand",
    "libcusolver": "cusolver", "libcusparse": "cusparse(?!Lt)", "libcusparseLt": "cusparseLt",
    "libnccl": "p?nccl", "libnvrtc": "nvrtc", "libnvshmem_host": "nvshmem", "libcuda": "cu[A-Z]",
}  # fmt: skip
SOURCES = {
    "libcudart": ["cudart.c"], "libcuda": ["driver.c"], "libcublas": ["blas.c"],
    "libcublasLt": ["-DLT", "blas.c"], "libnccl": ["nccl.c"],
}  # fmt: skip
REFUSAL = {"libcudart": 801, "libcuda": 801, "libcudnn": 3000}  # "not supported"; else 1


def printed(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def asked():
    """Of each NVIDIA library that torch links: the functions it calls, its symbols' version."""
    sonames, names, versions = set(), set(), {}
    for library in TORCH.glob("lib/lib*.so"):
        head = printed("objdump", "-p", library)
        sonames |= set(re.findall(r"NEEDED +(lib\S+)", head))
        for soname, wanted in re.findall(r"required from (\S+):\n((?: +0x.*\n)+)", head):
            versions[soname] = wanted.split()[3]
        undefined = printed("nm", "-D", "--undefined-only", library)
        names |= set(re.findall(r"^ +U (\w+)", undefined, re.M))
    found = {}
    for soname in sonames:
        if prefix := PREFIXES.get(soname.partition(".so")[0]):
            here = sorted(n for n in names if re.match(prefix, n))
            found[soname] = here, versions.get(soname, soname)
    return found


def generated(base, name):
    """Text of a weak function, which a source may define instead."""
    if name.startswith("cupti") and name.endswith("String"):
        return f'WEAK int {name}(int e, const char **s) {{ *s = "stand-in"; return 0; }}'
    if re.search("String|Name|Error$", name):
        return f'WEAK const char *{name}(void) {{ return "not computed by the stand-in"; }}'
    if name == "cudnnGetProperty":  # its version: torch refuses an older one than it was built with
        wheel = next((r for r in requires("torch") if "cudnn" in r), "cudnn==9.0.0")
        parts = ", ".join(re.findall(r"\d+", wheel.partition("==")[2])[:3])
        return f"WEAK int {name}(int part, int *v) {{ *v = (int[]){{{parts}}}[part]; return 0; }}"
    if "cublas" in base and re.search("Create|Destroy|Set|Get", name):
        return f"WEAK int {name}(void) {{ return 0; }}"
    if "cublas" in base:
        return f'WEAK int {name}(void) {{ return standin_library_launch("{name}"); }}'
    return f'WEAK int {name}(void) {{ standin_refuse("{name}"); return {REFUSAL.get(base, 1)}; }}'


def library(folder, soname, names, version, linked):
    """Compile a library with the name, and the version of its symbols, that torch asks for."""
    base = soname.partition(".so")[0]
    more, versions = folder / f"{soname}.c", folder / f"{soname}.map"
    head = "#include <stddef.h>\n#define WEAK __attribute__((weak))\n"
    head += "int standin_refuse(const char *), standin_library_launch(const char *);"
    lines = [head, *(generated(base, n) for n in names)]
    more.write_text("\n".join(lines))
    versions.write_text(f"{version} {{ global: *; }};\n")
    sources = [HERE / s if s.endswith(".c") else s for s in SOURCES.get(base, [])]
    flags = [f"-Wl,-soname,{soname}", f"-Wl,--version-script={versions}"]
    subprocess.run([*C, "-o", folder / soname, *sources, more, *flags, *linked], check=True)
    more.unlink()
    versions.unlink()


def build(folder):
    folder.mkdir(parents=True, exist_ok=True)
    libraries = asked()
    runtime = next(n for n in libraries if n.startswith("libcudart."))
    library(folder, runtime, *libraries.pop(runtime), ["-lpthread", "-ldl"])
    linked = [f"-L{folder}", f"-l:{runtime}", "-Wl,-rpath,$ORIGIN"]
    for soname, (names, version) in libraries.items():
        library(folder, soname, names, version, linked)
    nvml = folder / "libnvidia-ml.so.1"
    soname = f"-Wl,-soname,{nvml.name}"
    subprocess.run([*C, "-o", nvml, NVML, HERE / "nvml_more.c", "-lpthread", soname], check=True)
    kernels = ["-o", folder / "libstandin_kernels.so", HERE / "kernels.cpp"]
    headers = [f"-isystem{TORCH}/include", f"-isystem{TORCH}/include/torch/csrc/api/include"]
    torch = [f"-L{TORCH}/lib", "-lc10", "-lc10_cuda", "-ltorch_cpu", "-ltorch_cuda"]
    flags = ["-O1", "-std=c++20", "-fPIC", "-shared", "-Wall", "-Wno-sign-compare"]
    rest = [*INCLUDES, *headers, *torch, *linked, f"-Wl,-rpath-link,{folder}"]
    subprocess.run(["g++", *flags, *kernels, *rest], check=True)


def install(folder):
    """Load the libraries when a Python starts, and the kernels at the end of torch's import."""
    (SITE / "standin_cuda.pth").write_text(
        f"import os, sys; os.environ.setdefault('STANDIN_CUDA_LIBRARIES', {str(folder)!r}); "
        f"sys.path.insert(0, {str(HERE)!r}); import standin_cuda\n"
    )
    info = SITE / "standin_cuda-0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: standin-cuda\nVersion: 0\n")
    entry = "[torch.backends]\nstandin_cuda = standin_cuda:install\n"
    (info / "entry_points.txt").write_text(entry)


if __name__ == "__main__":
    to = Path(sys.argv[1]).resolve()
    build(to)
    install(to)
    print(to)
