# Make .venv with the pinned versions, or use the one that is there. Sourced by demo.sh and test.sh, which have gone
# to the top of the project; afterwards `python` is the Python of .venv.

# With --help, show the comment at the top of the script instead of installing anything.
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    sed -n '2,/^set/s/^# //p' "scripts/$(basename "$0")"
    exit
fi

source scripts/environment/python.sh

# Otherwise Python would compile the modules again in each process.
unset PYTHONDONTWRITEBYTECODE

# The stamp is written last: a .venv without it, or with the stamp of other requirements, is not complete.
if ! cmp -s requirements.txt .venv/installed_requirements.txt; then
    echo "Installing MindSpore, MindFormers and the tools into .venv (about 3.5 GB) ..."
    python_for_venv=$(find_python)
    "$python_for_venv" -m venv --clear .venv
    # Given twice, --quiet leaves out pip's warnings, but not its errors.
    pip=(.venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check)
    # Python 3.11 comes with a pip that takes twice as long. If this one is not to be had, the other does the same.
    "${pip[@]}" pip==26.3 2> /dev/null || true
    # MindSpore is more than half of all, so install it beside most of the rest. Here it may fail, because the third
    # command would install it. It is stopped if this script ends early.
    "${pip[@]}" --no-compile --no-deps --requirement <(grep ^mindspore== requirements.txt) 2> /dev/null &
    trap "kill $! 2> /dev/null" EXIT
    "${pip[@]}" --no-compile --requirement <(grep -v ^mind requirements.txt)
    wait
    trap - EXIT
    # Compile what MindSpore and MindFormers have, and what they import. Some of it gives warnings when it is compiled,
    # which would be errors in a test. Python compiles a module of another package when it is first imported.
    compile=(.venv/bin/python -W ignore -m compileall -qq)
    "${compile[@]}" .venv/lib/python3*/site-packages/mindspore &
    "${pip[@]}" --no-compile --requirement requirements.txt
    "${compile[@]}" .venv/lib/python3*/site-packages/mindformers &
    .venv/bin/python -W ignore -c "import mindformers" > /dev/null 2>&1 || true
    "${pip[@]}" --no-deps --no-build-isolation --editable .
    wait
    cp requirements.txt .venv/installed_requirements.txt
else
    echo "Using .venv, which is there already."
fi
# msrun starts whatever python comes first on the PATH.
PATH="$PWD/.venv/bin:$PATH"
