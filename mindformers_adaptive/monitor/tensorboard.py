"""Where scalars and histograms for TensorBoard go: beside MindFormers' own, or into a folder of their own."""

from mindformers.utils.tensorboard import get_tensorboard_writer
from tensorboardX import SummaryWriter

__all__ = ["open_writer"]


def open_writer(folder, purge_step=None):
    """Return MindFormers' writer where the YAML file has a ``tensorboard`` section, else one for a folder.

    Args:
        folder (str, optional): the folder, made if it is not there. None: no writer but MindFormers'.
        purge_step (int, optional): the step from which on what an earlier run wrote to the folder is hidden.

    Returns:
        tuple[tensorboardX.SummaryWriter, bool]: the writer, None if there is none, and whether the caller has to close
        it.

    Raises:
        OSError: if the folder cannot be written to.

    Examples:
        >>> import tempfile
        >>> writer, is_ours = open_writer(tempfile.mkdtemp())
        >>> is_ours
        True
        >>> writer.close()
    """
    writer = get_tensorboard_writer()
    if writer is not None or folder is None:
        return writer, False
    return SummaryWriter(str(folder), purge_step=purge_step), True
