"""Push a model on purpose: edits of its activations, how they are found, what they cost."""

from microtome.interventions.artefact import Artefact as Artefact
from microtome.interventions.generation import Generated as Generated
from microtome.interventions.generation import generate as generate
from microtome.interventions.generation import stream as stream
from microtome.interventions.ledger import Ledger as Ledger
from microtome.interventions.ledger import NeverActed as NeverActed
from microtome.interventions.operations import Add as Add
from microtome.interventions.operations import Affine as Affine
from microtome.interventions.operations import Feedback as Feedback
from microtome.interventions.operations import Function as Function
from microtome.interventions.operations import Project as Project
from microtome.interventions.operations import Rotate as Rotate
from microtome.interventions.operations import Swap as Swap
from microtome.interventions.positions import Tokens as Tokens
from microtome.interventions.steering import Gate as Gate
from microtome.interventions.steering import Intervention as Intervention
from microtome.interventions.steering import Steering as Steering
from microtome.interventions.steering import steered as steered
