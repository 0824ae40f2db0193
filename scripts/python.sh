# find_python prints the name of a Python that the pinned versions can be installed for. To be sourced.

find_python() {
    local candidate
    for candidate in python3.11 python3 python; do
        "$candidate" -c 'import sys, venv; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || continue
        echo "$candidate"
        return
    done
    echo "Python 3.11 with its venv module is needed, but none of python3.11, python3 and python is one." >&2
    return 1
}
