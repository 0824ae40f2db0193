"""Stand-ins for the libraries of CANN, without which MindSpore's Ascend plugin does not load.

In a dry run (MS_SIMULATION_LEVEL=1) MindSpore calls no device. But the dynamic loader still needs every library and
every function that the plugin names, and MindSpore still calls some functions of CANN to make a kernel. One library of
C functions is generated as the stand-in for all libraries. A function that ``ANSWERS`` names returns the answer given
there; every other function prints its name and aborts. So no stand-in computes anything that a dry run shows.
"""

import hashlib
import importlib.metadata
import importlib.util
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# The files in MindSpore that support Ascend devices. They can be loaded only with the libraries of CANN.
PLUGIN = (
    "lib/plugin/libmindspore_ascend.so.2",
    "lib/plugin/ascend/libhccl_plugin.so",
    "lib/plugin/ascend/libmindspore_graph_ir.so",
    "lib/libmindspore_ge_backend.so",
)
# The library of CANN's kernels. MindSpore opens this library by name.
KERNELS = "libopapi.so"

# The oldest version of MindSpore that works with the stand-ins for CANN. MindSpore 2.7 does not work with them: even in
# a dry run, it asks for the properties of the device, which no stand-in knows.
OLDEST = (2, 9)

# A stand-in for a CANN function that is not in ANSWERS prints this text and the name of the function, and aborts.
CALLED = "A stand-in for CANN was called: "

# The stand-ins that return a value instead of aborting: a pattern for the names of CANN functions, and the body of the
# stand-in in C. In the body, `object` is the first argument of the function.
ANSWERS = (
    # Whether a kernel exists and how much memory it needs: 0 means that it exists and needs none. CANN would check
    # shapes and dtypes here.
    (r"aclnn\w+GetWorkspaceSize", "return 0;"),
    # Handles of the arguments of a kernel. They point to an unused buffer.
    (r"aclCreate(Tensor|Scalar|(Int|Float|Bool)Array|TensorList)|aclopCreateAttr", "return nothing;"),
    (r"aclDestroy(Tensor|Scalar|(Int|Float|Bool)Array|TensorList|AclOpExecutor)|aclopDestroyAttr", "return 0;"),
    (r"aclopSetAttr\w+|aclSetAclOpExecutorRepeatable|aclInit|aclFinalize|aclnnInit|aclnnFinalize", "return 0;"),
    (r"(Un)?InitHugeMemThreadLocal|ReleaseHugeMem", "return 0;"),
    # Constructors of classes in CANN's graph engine. Some of them run while MindSpore loads a library, so they must not
    # abort. Each constructor fills its new object with zeros. Objects of the two Register classes are empty.
    (r"_ZN2ge(23OperatorCreatorRegister|22InferShapeFuncRegister)C[12]E.*", "return object;"),
    # An Operator has 24 bytes, because it has virtual functions and a shared_ptr.
    (r"_ZN2ge8OperatorC[12]E.*|_ZN2ge15OperatorFactory14CreateOperatorEPKcS\d_", "return memset(object, 0, 24);"),
    # An object of these classes has at most a shared_ptr, so 16 bytes.
    (r"_ZN2ge(6Tensor|10TensorType|7Promote)C[12]E.*", "return memset(object, 0, 16);"),
    # The attributes of kernels: SetAttr stores nothing, and GetAttr succeeds but leaves the default value.
    (r"_ZN2ge8Operator7SetAttrE.*", "return object;"),
    (r"_ZNK2ge8Operator7GetAttrE.*", "return 0;"),
    # CANN's map from error codes to messages. The stand-in returns an empty std::map.
    (r"_ZN2ge13StatusFactory8InstanceEv", "return &empty_map;"),
)

HEAD = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char nothing[4096];
/* An empty std::map as libstdc++ lays it out: a comparison, and the root that a search for an entry ends at. */
static struct { void *less; long color; void *parent, *leftmost, *rightmost; size_t entries; }
    empty_map = {0, 0, 0, &empty_map.color, &empty_map.color, 0};
static void *called(const char *name) { fprintf(stderr, "CALLED%s\\n", name); fflush(stderr); abort(); }
""".replace("CALLED", CALLED)

# Two functions that replace MindSpore's own. The first: in a dry run, a thread of MindSpore asks for reports of the
# device without a pause, which would keep a core busy, so wait a little before the answer that there are none. The
# second: MindSpore needs the name of the Ascend chip, but cannot find it, so return the name from an environment
# variable. This function calls the constructor of std::string in the ABI of MindSpore's wheel. It must have an even
# address, because an odd address in a C++ pointer to a member function marks a virtual function.
REPLACED = """
#include <stdlib.h>
#include <unistd.h>
int _ZN9mindspore6device6ascend27SimuFuncIaclrtProcessReportIiEET_i(int milliseconds) { usleep(1000); return 0; }
void _ZNSsC1EPKcRKSaIcE(void *string, const char *text, const void *allocator);
__attribute__((aligned(16))) void *_ZNK9mindspore9MsContext18ascend_soc_versionEv(void *string) {
  char allocator;
  _ZNSsC1EPKcRKSaIcE(string, getenv("DRY_RUN_CHIP"), &allocator);
  return string;
}
"""


def missing():
    """Return what this machine lacks for a dry run, with the remedy, or an empty text."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return f"the stand-ins for CANN need Linux on x86_64, but this is {sys.platform} on {platform.machine()}"
    for program, package in (("gcc", "gcc and libc6-dev"), ("ldd", "libc-bin")):
        if shutil.which(program) is None:
            return f"there is no {program}: install the package {package}"
    version = importlib.metadata.version("mindspore")
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        return f"MindSpore {version} needs CANN even for a dry run: install MindSpore 2.9.0 or later"
    if not (_mindspore() / PLUGIN[0]).exists():
        return f"this MindSpore has no Ascend plugin ({PLUGIN[0]}): install MindSpore's wheel from PyPI"
    return ""


def folder_of_stand_ins(cache):
    """Return the folder of CANN stand-ins for the installed MindSpore; make the folder if the cache lacks it.

    Args:
        cache (Path): the parent folder, with a folder for each MindSpore. It may be removed at any time.

    Returns:
        Path, the folder with ``latest/lib64``, ``latest/python`` and ``replaced.so``.
    """
    content = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]
    folder = Path(cache, f"mindspore-{importlib.metadata.version('mindspore')}-{content}").absolute()
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        whole = Path(temporary, "whole")
        _make(whole)
        try:
            whole.rename(folder)
        except OSError:
            # If another process has already created the folder of stand-ins for CANN's libraries, use that folder.
            if not folder.exists():
                raise
    return folder


def _make(folder):
    # MindSpore recognizes the path of CANN's libraries by "latest" and "lib64", so use these names for the folders.
    libraries = folder / "latest" / "lib64"
    libraries.mkdir(parents=True)
    absent, undefined = _wanted()
    names = undefined | _searched()
    _compile(HEAD + "\n".join(map(_function, sorted(names))), libraries / "libcann_stand_ins.so")
    for library in {*absent, KERNELS}:
        (libraries / library).symlink_to("libcann_stand_ins.so")
    # A training with several processes imports this Python package of CANN to read CANN's version.
    package = folder / "latest" / "python" / "hccl"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "sys_version.py").write_text("__sys_version__ = '9.0'\n")
    _compile(REPLACED, folder / "replaced.so", "-l:libstdc++.so.6")


def _wanted():
    """Return the missing libraries that MindSpore's Ascend plugin needs, and the functions that the plugin calls."""
    libraries, functions = set(), set()
    for library in PLUGIN:
        if not (file := _mindspore() / library).exists():
            continue
        printed = subprocess.run(["ldd", "-r", str(file)], capture_output=True, text=True).stdout
        libraries |= set(re.findall(r"^\s*(\S+) => not found$", printed, re.MULTILINE))
        functions |= set(re.findall(r"^undefined symbol: (\w+)", printed, re.MULTILINE))
    # Make stand-ins only for CANN. The plugin also needs functions and libraries of Python and MindSpore, but both are
    # loaded before the plugin.
    own_libraries = {path.name for path in (_mindspore() / "lib").rglob("*.so*")}
    return libraries - own_libraries, {name for name in functions if not re.match(r"_?Py|_Z\w*9mindspore", name)}


def _searched():
    """Return the names of CANN functions that MindSpore looks up at run time: kernels, and names that match ANSWERS."""
    answered = set()
    plugin = _mindspore() / "lib" / "plugin"
    for file in (*plugin.glob("*ascend*.so*"), *plugin.glob("ascend/*.so")):
        data = file.read_bytes()
        words = {word.decode() for word in re.findall(rb"(?<=\0)(?:acl|Init|UnInit|Release)\w+(?=\0)", data)}
        answered |= {word for word in words if _answer(word)}
        answered |= _kernels(data)
    # The C++ compiler puts a short function name into instructions, not into a string, so a search of the libraries
    # misses it. Search the headers too.
    for header in (_mindspore() / "include" / "mindspore" / "ops" / "kernel" / "ascend").rglob("*.h"):
        answered |= _kernels(header.read_bytes())
    return answered


def _kernels(data):
    names = {name.decode().removesuffix("GetWorkspaceSize") for name in re.findall(rb"aclnn[A-Z][A-Za-z0-9]*", data)}
    return names | {f"{name}GetWorkspaceSize" for name in names}


def _answer(name):
    return next((answer for pattern, answer in ANSWERS if re.fullmatch(pattern, name)), None)


def _function(name):
    body = _answer(name) or f'return called("{name}");'
    return f"void *{name}(void *object) {{ {body} }}"


def _compile(source, target, *options):
    command = ["gcc", "-shared", "-fPIC", "-O1", "-w", "-fno-builtin", "-x", "c", "-", "-o", str(target), *options]
    compiled = subprocess.run(command, input=source, capture_output=True, text=True)
    if compiled.returncode != 0:
        raise RuntimeError(f"gcc could not compile the stand-ins for CANN's libraries: {compiled.stderr[-1000:]}")


def _mindspore():
    """Return the folder of the installed MindSpore, without importing MindSpore."""
    return Path(importlib.util.find_spec("mindspore").origin).parent
