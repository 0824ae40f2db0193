# Make .venv_MINDSPORE_MINDFORMERS with a pair of versions, or use the one that is there. Sourced by scripts that set
# mindspore_version and mindformers_version and have gone to the top of the project; afterwards `python` is the Python of the
# environment. PYTHON names another Python to make it with.

source scripts/environment/python.sh

# What MindSpore and MindFormers require, less each other and hyper-parallel: 1.9.0 runs with MindSpore 2.10.0 and 2.1.0
# too, but does not say so, and MindFormers 2.x names hyper-parallel, which PyPI does not have.
required_by_pair() {
    "$venv/bin/python" - <<'END'
from importlib.metadata import requires

for requirement in requires("mindspore") + requires("mindformers"):
    if not requirement.startswith(("mindspore", "hyper-parallel")) and "extra ==" not in requirement:
        print(requirement)
END
}

venv=.venv_${mindspore_version}_$mindformers_version
if [ ! -e "$venv/complete" ]; then
    "$(find_python)" -m venv --clear "$venv"
    pip=("$venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check)
    "${pip[@]}" --no-deps "mindspore==$mindspore_version" "mindformers==$mindformers_version"
    # MindFormers 2.x asks for a newer setuptools than is pinned, and for a pyarrow whose newest needs NumPy 2.
    leave_out='^mind'
    [ "${mindformers_version%%.*}" = 1 ] || leave_out='^(mind|setuptools)'
    grep -vE "$leave_out" requirements.txt > "$venv/pinned.txt"
    required_by_pair > "$venv/required.txt"
    "${pip[@]}" --requirement "$venv/pinned.txt" --requirement "$venv/required.txt" 'numpy<2' 'pyarrow<26'
    "${pip[@]}" --no-deps --no-build-isolation --editable .
    if [ "$mindformers_version" = 2.0.0 ]; then
        # One model imports hyper-parallel as soon as MindFormers is imported. Its folder gets the two names, and no model.
        models=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/mindformers/models
        printf 'class %s:\n    pass\n\n\n' DeepseekV4Config DeepseekV4ForCausalLM > "$models/deepseek4/__init__.py"
    fi
    touch "$venv/complete"
fi
PATH="$PWD/$venv/bin:$PATH"
