/* A reshard as MPI programs write it: every unit task is a broadcast over a communicator of its sender and its
 * receivers, or one message per receiver. Times it and checks every element.
 *
 *   mpi_reshard PROBLEM bcast|isend REPEATS SLOW
 *
 * PROBLEM is text: dimensions and shape of the tensor, number of tasks, then for each task its box (low and high
 * per dimension), its sender, the number of its receivers and the receivers. Boxes travel packed; packing is not
 * timed. See rounds.h.
 */
#include <unistd.h>

#include "rounds.h"

enum { kMaxDims = 8 };

typedef struct {
  int64_t lo[kMaxDims], hi[kMaxDims], elements;
  int sender, receivers, *receiver; /* world ranks */
  MPI_Comm comm;                    /* sender first; MPI_COMM_NULL elsewhere */
  int takes_part;
  int32_t *data;
} Task;

static int dims, tasks_count, by_broadcast;
static int64_t shape[kMaxDims];
static Task *tasks;

static void read_problem(const char *path) {
  FILE *file = fopen(path, "r");
  if (!file || fscanf(file, "%d", &dims) != 1 || dims < 1 || dims > kMaxDims) fail("cannot read the problem");
  for (int d = 0; d < dims; ++d)
    if (fscanf(file, "%ld", &shape[d]) != 1) fail("the shape ends early");
  if (fscanf(file, "%d", &tasks_count) != 1 || tasks_count < 0) fail("no task count");
  tasks = calloc((size_t)tasks_count, sizeof(Task));
  for (int t = 0; t < tasks_count; ++t) {
    Task *task = &tasks[t];
    task->elements = 1;
    for (int d = 0; d < dims; ++d) {
      if (fscanf(file, "%ld %ld", &task->lo[d], &task->hi[d]) != 2) fail("a box ends early");
      task->elements *= task->hi[d] - task->lo[d];
    }
    if (fscanf(file, "%d %d", &task->sender, &task->receivers) != 2) fail("a task ends early");
    task->receiver = malloc(sizeof(int) * (size_t)task->receivers);
    task->takes_part = rank == task->sender;
    for (int i = 0; i < task->receivers; ++i) {
      if (fscanf(file, "%d", &task->receiver[i]) != 1) fail("receivers end early");
      task->takes_part |= rank == task->receiver[i];
    }
    if (task->takes_part) {
      if (task->elements > INT32_MAX) fail("a box of more than 2^31 elements");
      task->data = malloc(sizeof(int32_t) * (size_t)task->elements);
    }
  }
  fclose(file);
}

static void make_communicators(void) {
  MPI_Group world;
  MPI_Comm_group(MPI_COMM_WORLD, &world);
  for (int t = 0; t < tasks_count; ++t) {
    Task *task = &tasks[t];
    int *members = malloc(sizeof(int) * (size_t)(task->receivers + 1));
    members[0] = task->sender;
    memcpy(members + 1, task->receiver, sizeof(int) * (size_t)task->receivers);
    MPI_Group group;
    MPI_Group_incl(world, task->receivers + 1, members, &group);
    task->comm = MPI_COMM_NULL;
    if (task->takes_part) MPI_Comm_create_group(MPI_COMM_WORLD, group, t, &task->comm);
    MPI_Group_free(&group);
    free(members);
  }
  MPI_Group_free(&world);
}

/* Fills (salt >= 0) or checks the box; returns the number of wrong elements. */
static int64_t visit(Task *task, int32_t salt, int check) {
  int64_t at[kMaxDims], wrong = 0;
  memcpy(at, task->lo, sizeof at);
  for (int64_t i = 0; i < task->elements; ++i) {
    int64_t index = 0;
    for (int d = 0; d < dims; ++d) index = index * shape[d] + at[d];
    const int32_t value = (int32_t)(uint32_t)((uint64_t)index + (uint64_t)salt);
    if (check)
      wrong += task->data[i] != value;
    else
      task->data[i] = value;
    for (int d = dims - 1; d >= 0 && ++at[d] == task->hi[d]; --d) at[d] = task->lo[d];
  }
  return wrong;
}

static void broadcasts(void) {
  for (int t = 0; t < tasks_count; ++t)
    if (tasks[t].takes_part) MPI_Bcast(tasks[t].data, (int)tasks[t].elements, MPI_INT32_T, 0, tasks[t].comm);
}

static void messages(void) {
  int count = 0, room = 0;
  for (int t = 0; t < tasks_count; ++t) room += tasks[t].receivers + 1;
  MPI_Request *requests = malloc(sizeof(MPI_Request) * (size_t)room);
  for (int t = 0; t < tasks_count; ++t) {
    Task *task = &tasks[t];
    if (!task->takes_part) continue;
    const int n = (int)task->elements, tag = t % 32768;
    if (rank == task->sender) {
      for (int i = 0; i < task->receivers; ++i)
        MPI_Isend(task->data, n, MPI_INT32_T, task->receiver[i], tag, MPI_COMM_WORLD, &requests[count++]);
    } else {
      MPI_Irecv(task->data, n, MPI_INT32_T, task->sender, tag, MPI_COMM_WORLD, &requests[count++]);
    }
  }
  MPI_Waitall(count, requests, MPI_STATUSES_IGNORE);
  free(requests);
}

static void move(void) {
  if (by_broadcast)
    broadcasts();
  else
    messages();
}

static void fill(int32_t salt) {
  for (int t = 0; t < tasks_count; ++t) {
    if (!tasks[t].takes_part) continue;
    if (rank == tasks[t].sender)
      visit(&tasks[t], salt, 0);
    else
      memset(tasks[t].data, 0xFF, sizeof(int32_t) * (size_t)tasks[t].elements);
  }
}

static int64_t wrong(int32_t salt) {
  int64_t found = 0;
  for (int t = 0; t < tasks_count; ++t)
    if (tasks[t].takes_part && rank != tasks[t].sender) found += visit(&tasks[t], salt, 1);
  return found;
}

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (argc != 5) fail("usage: mpi_reshard PROBLEM bcast|isend REPEATS SLOW");
  read_problem(argv[1]);
  by_broadcast = strcmp(argv[2], "bcast") == 0;
  if (by_broadcast) make_communicators();
  rounds(atoi(argv[3]), atof(argv[4]));
  /* Where finalizing hangs, which some libraries do over some transports, the processes just end together. */
  if (getenv("MPI_RESHARD_SKIP_FINALIZE")) {
    MPI_Barrier(MPI_COMM_WORLD);
    usleep(200000); /* what is still on its way to others must not be cut off */
    _exit(0);
  }
  MPI_Finalize();
  return 0;
}
